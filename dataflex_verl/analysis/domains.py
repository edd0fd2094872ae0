"""Which domains a run logged something about, read from the names of its metrics."""

from __future__ import annotations

import re

from dataflex_verl.analysis.records import RunLog

_SHARE = re.compile(r"dataflex/prop_(?P<part>.+)")


def domain_parts(log: RunLog) -> list[str]:
    """The domains of a mixing run, as they are written in names of metrics."""
    return sorted(match["part"] for name in log.series if (match := _SHARE.fullmatch(name)))


def shown_domain(part: str) -> str:
    """The domain's own name, or what is left of one that was shortened."""
    # Torch comes with it, so it is imported only where there are domains.
    from dataflex_hooks.metric_names import decode

    try:
        return decode(part)
    except ValueError:
        return part

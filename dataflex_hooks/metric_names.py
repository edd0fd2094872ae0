"""Metric names that mean what they say: safe against reduction by substring, readable, and never twice the same.

verl reduces the metrics of several updates in a step (``parameter_sync_step > 1``) by what it finds in a name: "max"
or "min" takes the extreme, "sum" or "total" adds, an ending in "lr" keeps the last, and everything else is averaged
(``MetricsAggregator``). A domain called "minerva" would be reduced by its smallest value. So whatever a user chose
(label, reason, domain) is encoded before it becomes part of a name: ``mi-nerva``, ``ma-x_weight``, ``openai:gsm8k``.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]

FIXED = frozenset(
    {
        "added_rows",
        "added_rows_without_group",
        "applied",
        "dropped_frac",
        "ess_frac",
        "fallback",
        "fill_cut",
        "fill_largest",
        "kept_frac",
        "kept_groups_frac",
        "kept_tokens_frac",
        "lone_rows",
        "reward_adjustment",
        "reward_all",
        "reward_kept",
        "skip_update",
        "weight_kept_mean",
        "weight_largest",
        "weight_mean",
        "weight_std",
    }
)
"""Names under ``dataflex/`` that belong to no label and no domain; a domain never takes one of them."""

OF_LABEL = frozenset(
    {
        "abstained_total",
        "decided_total",
        "disabled",
        "dropped_rows_total",
        "ess_frac",
        "kept_frac",
        "kept_groups_frac",
        "masked_rows_total",
        "reward_scale",
        "reward_shift",
        "slow_total",
        "weight_largest",
        "weight_mean",
        "weight_std",
    }
)
"""Names under ``dataflex/<label>/`` that the host logs; a plugin's own metrics have others."""

_ADDED_UP = "_total"
_LONGEST = 100
_CUT = 80
_EMPTY = ".ff"
_SHORTENED = ".fe"
# A hyphen goes in after each of these; where one or more stand there already it is one more, so nothing is lost.
_HEAD = re.compile(r"ma(?=-*x)|mi(?=-*n)|su(?=-*m)|tota(?=-*l)|(?:(?<=_)|\A)l(?=-*r\Z)", re.IGNORECASE)
_MARKED = re.compile(r"(ma)-(?=-*x)|(mi)-(?=-*n)|(su)-(?=-*m)|(tota)-(?=-*l)|((?:(?<=_)|\A)l)-(?=-*r\Z)", re.IGNORECASE)
# A dot is itself where it cannot be taken for the start of an escape.
_ESCAPED = re.compile(r"[^\w\-/.]|\.(?=[0-9a-f]{2}|[^\w\-]|\Z)")
_ESCAPE = re.compile(r"(?:\.[0-9a-f]{2})+")
_KIND = re.compile(r"[a-z]+")


def reduction(name: str) -> Reduction:
    """Return how verl reduces the metric ``name`` over the updates of a step; "mean" is weighted by samples."""
    lower = name.lower()
    if lower == "lr" or lower.endswith(("/lr", "_lr")):
        return "last"
    if "timing_s/" in lower or "timing_per_token_ms/" in lower:
        return "sum"
    for word, kind in (("max", "max"), ("min", "min"), ("sum", "sum"), ("total", "sum")):
        if word in lower:
            return kind  # type: ignore[return-value]
    return "mean"


def encode(text: str) -> str:
    """Return ``text`` as a part of a metric name: letters, digits, ``_``, ``-``, ``.`` and ``:`` (for ``/``) only.

    Two different texts never give the same part. A hyphen breaks the words that verl looks for; other characters
    become ``.`` and two hex digits a byte of UTF-8. A part longer than 100 characters is cut and ends with a hash.
    """
    if not text:
        return _EMPTY
    part = _ESCAPED.sub(_as_bytes, _HEAD.sub(r"\g<0>-", text)).replace("/", ":")
    if len(part) <= _LONGEST:
        return part
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{part[:_CUT]}{_SHORTENED}{digest}"


def decode(part: str) -> str:
    """Return the text that :func:`encode` was given.

    Raises:
        ValueError: the part was shortened; the whole text is not in it.
    """
    if part == _EMPTY:
        return ""
    if _SHORTENED in part:
        raise ValueError(f"{part!r} is the beginning of a longer name and a hash of it")
    plain = _ESCAPE.sub(lambda found: _from_bytes(found.group()), part.replace(":", "/"))
    return _MARKED.sub(lambda found: next(head for head in found.groups() if head is not None), plain)


def label_metric(label: str, name: str, detail: str | None = None) -> str:
    """Return ``dataflex/<label>/<name>`` or, with the user's ``detail``, ``dataflex/<label>/<name>/<detail>``."""
    metric = f"dataflex/{encode(label)}/{name}"
    return metric if detail is None else f"{metric}/{encode(detail)}"


def plugin_metric(label: str, name: str) -> str:
    """Return the name for a number that a plugin logs itself: ``dataflex/<label>/<name>``.

    Averaged by verl over the updates of a step, whatever it is called; added up where ``name`` ends in ``_total``.

    Raises:
        ValueError: the host logs something else by that name, see :data:`OF_LABEL`.
    """
    if name in OF_LABEL:
        raise ValueError(f"metric {name!r} is logged by the host: give it another name")
    if name.endswith(_ADDED_UP):
        return f"dataflex/{encode(label)}/{encode(name[: -len(_ADDED_UP)])}{_ADDED_UP}"
    return label_metric(label, encode(name))


def label_time(label: str) -> str:
    """Return the name for the seconds that a plugin took: ``timing_s/dataflex/<label>``, added up by verl."""
    return f"timing_s/dataflex/{encode(label)}"


def domain_metric(kind: str, domain: str) -> str:
    """Return ``dataflex/<kind>_<domain>``, averaged by verl whatever the domain is called.

    Args:
        kind: what is measured, in lower-case letters (``prop``, ``reward``): without an underscore, so that kind and
            domain can be told apart.
        domain: any text.

    Raises:
        ValueError: a kind of another form, or one that verl would not average.
    """
    if not _KIND.fullmatch(kind) or reduction(f"dataflex/{kind}_") != "mean":
        raise ValueError(f"kind {kind!r}: lower-case letters without max, min, sum or total in them")
    part = encode(domain)
    for fixed in FIXED:
        if fixed.startswith(f"{kind}_"):
            # reward_all is the mean over everything; a domain called "all" becomes reward_al-l.
            tail = fixed[len(kind) + 1 :]
            if re.fullmatch(f"{re.escape(tail[:-1])}-*{tail[-1]}", part):
                part = f"{part[:-1]}-{part[-1]}"
    return f"dataflex/{kind}_{part}"


def _as_bytes(found: re.Match[str]) -> str:
    return "".join(f".{byte:02x}" for byte in found.group().encode("utf-8", "surrogatepass"))


def _from_bytes(escapes: str) -> str:
    return bytes.fromhex(escapes.replace(".", "")).decode("utf-8", "surrogatepass")

"""The third part of the catalogue of errors: domains that do not fit the data, or the checkpoint."""

from __future__ import annotations

DOMAINS = """\
## Domains and the data

Known when the training data has been read, before any worker is created; a starved domain in the step that draws it.
"""
DOMAIN_ENTRIES: tuple[tuple[str, str, str, str], ...] = (
    (
        "No column that names domains",
        "column",
        "Without `dataflex.domain_key` the column is `domain`, or else `data_source`.",
        "Set `dataflex.domain_key` to a column of the data.",
    ),
    (
        "A row without a domain",
        "row",
        "It could never be drawn.",
        "Give every row a domain.",
    ),
    (
        "A domain without rows",
        "domain",
        "A listed domain that cannot be sampled would leave its share unfilled.",
        "List domains that the data has, or none: they are then discovered.",
    ),
    (
        "Another dataset on resume",
        "dataset",
        "The checkpoint's positions are those of other rows.",
        "Resume with the data, and the filter, of the checkpoint; or start a new run.",
    ),
    (
        "A checkpoint of another data loader",
        "loader",
        "verl would only warn, and begin the data anew.",
        "Resume a checkpoint of a run with domains, or say with `dataflex.resume=fresh` that domains begin anew.",
    ),
    (
        "A domain of which too few prompts are admitted",
        "starved",
        "With `dataflex.on_starved=error`, 8 candidates for every prompt wanted were not enough.",
        "Admit more, or leave `dataflex.on_starved` at `take`, which takes the best refused ones.",
    ),
)


def domain_message(case: str) -> str:
    """What a run says when domains do not fit in one of the ways of DOMAIN_ENTRIES."""
    import numpy as np

    from dataflex_hooks import DataFlexError
    from dataflex_verl.domain_column import read_domains
    from dataflex_verl.sampler import DomainSampler

    rows = [{"prompt": f"p{row}", "topic": "math" if row % 3 else "code"} for row in range(12)]
    try:
        if case == "column":
            read_domains(rows, None, None)
        if case == "row":
            read_domains([*rows, {"prompt": "p12", "topic": None}], "topic", None)
        if case == "domain":
            read_domains(rows, "topic", ["math", "cod"])
        if case == "dataset":
            saved = DomainSampler(read_domains(rows[:9], "topic", None)).state_dict()
            DomainSampler(read_domains(rows, "topic", None)).load_state_dict(saved)
        if case == "loader":
            DomainSampler(read_domains(rows, "topic", None)).load_state_dict({"_snapshot": {}})
        if case == "starved":
            sampler = DomainSampler(
                read_domains(rows, "topic", ["math"]),
                admit=lambda candidates: (np.zeros(len(candidates), dtype=bool), None),
                on_starved="error",
            )
            sampler.draw(4)
    except DataFlexError as error:
        return str(error)
    raise AssertionError(f"{case} raised nothing")

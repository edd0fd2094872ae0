"""How far a factor on the loss damps AdamW, and for how long: the figures of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
BEFORE, ON, AFTER = 5000, 3000, 3000
SPANS = ((0, 10), (10, 100), (100, 500), (500, 1000), (1000, 2000), (2000, 3000))


def displacements(scales: list[float]) -> torch.Tensor:
    """Length of each of AdamW's steps, verl's defaults, on 100 parameters whose gradient is noise of the same size."""
    noise = torch.Generator().manual_seed(0)
    parameters = torch.zeros(100, requires_grad=True)
    optimizer = torch.optim.AdamW([parameters], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, foreach=False)
    lengths = []
    for scale in scales:
        before = parameters.detach().clone()
        parameters.grad = scale * torch.randn(100, generator=noise)
        optimizer.step()
        lengths.append((parameters.detach() - before).norm())
    return torch.stack(lengths).double()


@pytest.fixture(scope="module")
def damped() -> torch.Tensor:
    """Ratio of step lengths to those without a guard, (ON + AFTER,), from the update at which it goes on."""
    free = displacements([1.0] * (BEFORE + ON + AFTER))
    guarded = displacements([1.0] * BEFORE + [0.1] * ON + [1.0] * AFTER)
    assert torch.equal(free[:BEFORE], guarded[:BEFORE])
    return (guarded / free)[BEFORE:]


def test_the_table_of_the_readme_is_what_adamw_does(damped) -> None:
    for first, title in ((0, "goes on"), (ON, "goes off")):
        means = [float(damped[first + a : first + b].mean()) for a, b in SPANS]
        row = re.search(rf"^\| {title} \|(.+)\|$", README.read_text(encoding="utf-8"), re.MULTILINE)
        assert row and [float(cell) for cell in row[1].split("|")] == pytest.approx(means, abs=0.05)


def test_after_a_hundred_updates_steps_are_hardly_longer_than_before() -> None:
    free = displacements([1.0] * (BEFORE + 300))
    guarded = displacements([1.0] * BEFORE + [0.1] * 100 + [1.0] * 200)
    assert 0.1 < float((guarded / free)[BEFORE : BEFORE + 100].mean()) < 0.25
    assert 1.0 < float((guarded / free)[BEFORE + 100 :].max()) < 1.06


def test_a_constant_factor_cancels() -> None:
    torch.testing.assert_close(displacements([0.1] * 50), displacements([1.0] * 50), rtol=1e-4, atol=0)

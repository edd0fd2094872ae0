"""A wheel of somebody else's, written to the published contract, on the real trainer: by name, into the gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import torch

import dataflex_hooks as dh
from dataflex_hooks import UpdateDecision
from tests.real.plugins import Decide
from tests.unit.contract.acme_package import installed

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", autouse=True)
def acme(live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """pip has installed the wheel for this module: only the trainer's process, this one, runs hooks."""
    with installed(tmp_path_factory.mktemp("acme")):
        yield


def block(mechanism: str, scorer: str, actuator: str, **params: Any) -> dict[str, Any]:
    return {"mechanism": mechanism, "scorer": {"name": scorer}, "actuator": {"name": actuator, "params": params}}


def distances(rewards: list[float], uids: list[str]) -> list[float]:
    """Distance of each reward from the mean of its group; nothing of acme's code in it."""
    groups: dict[str, list[float]] = {}
    for reward, uid in zip(rewards, uids, strict=True):
        groups.setdefault(uid, []).append(reward)
    return [abs(reward - fmean(groups[uid])) for reward, uid in zip(rewards, uids, strict=True)]


def spread(outcome: Any) -> dict[str, float]:
    """The distance of each row, by key, from the rows that verl stored."""
    rewards = {key: float(values.sum()) for key, values in outcome.of("rm_scores").items()}
    found = distances(list(rewards.values()), [key.rsplit("_", 2)[0] for key in rewards])
    return dict(zip(rewards, found, strict=True))


def decide(make: Any) -> Decide:
    """A plugin of this test: ``make`` turns the distances into a decision."""
    return Decide(
        lambda batch: make(torch.tensor(distances(batch.rewards.tolist(), list(batch.non_tensor_batch["uid"]))))
    )


def test_its_components_come_from_the_installed_wheel(live) -> None:
    for kind, name in (("scorer", "acme_spread"), ("selector", "acme_above"), ("mixer", "acme_inverse")):
        component = dh.REGISTRY.get(kind, name)
        assert component.__module__ == "acme_dataflex.components"
        assert "/site/acme_dataflex/" in sys.modules[component.__module__].__file__


def test_its_selector_takes_rows_out_of_the_gradient(live, stored) -> None:
    plain = live.update(stored)
    chosen = live.update(stored, block("select", "acme_spread", "acme_above", limit=0.3))
    kept = {key for key, value in spread(plain).items() if value > 0.3}
    assert 0 < len(kept) < len(stored.keys)
    for key, weights in chosen.of("rollout_is_weights").items():
        assert (weights == (1.0 if key in kept else 0.0)).all()
    mask = decide(lambda values: UpdateDecision(mask=values > 0.3))
    assert chosen.grad_norm == live.update(stored, plugins={"mask": mask}).grad_norm
    assert chosen.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
    assert chosen.metrics["dataflex/kept_frac"] == pytest.approx(len(kept) / len(stored.keys))

    assert live.update(stored, block("select", "acme_spread", "acme_above", limit=9.0)).grad_norm == 0.0
    everything = live.update(stored, block("select", "acme_spread", "acme_above", limit=-1.0))
    assert everything.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)


def test_its_reweighter_scales_each_response_in_the_loss(live, stored) -> None:
    plain = live.update(stored)
    weighed = live.update(stored, block("reweight", "acme_spread", "acme_affine", slope=2.0))
    raw, masks = {key: 1 + 2 * value for key, value in spread(plain).items()}, weighed.of("response_mask")
    tokens = {key: float(mask.sum()) for key, mask in masks.items()}
    mean = sum(raw[key] * tokens[key] for key in raw) / sum(tokens.values())
    assert len({round(value, 6) for value in raw.values()}) > 1
    for key, weights in weighed.of("rollout_is_weights").items():
        torch.testing.assert_close(weights, torch.full_like(weights, raw[key] / mean), rtol=1e-5, atol=0)
    own = decide(lambda values: UpdateDecision(weights=1 + 2 * values, normalize="mean"))
    assert weighed.grad_norm == pytest.approx(live.update(stored, plugins={"own": own}).grad_norm, rel=1e-6)
    assert weighed.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)

    neutral = live.update(stored, block("reweight", "acme_spread", "acme_affine", slope=0.0))
    assert neutral.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)


def test_its_token_scorer_and_reweighter_scale_each_token(live, stored) -> None:
    fields = ("rollout_is_weights", "response_mask", "old_log_probs")
    weighed = live.update(stored, block("reweight", "acme_surprise", "acme_affine"), fields=fields)
    probabilities = {key: values.exp() for key, values in weighed.of("old_log_probs").items()}
    masks = weighed.of("response_mask")
    raw = {key: 2.0 - value for key, value in probabilities.items()}
    total = sum(float((raw[key] * masks[key]).sum()) for key in raw)
    mean = total / sum(float(mask.sum()) for mask in masks.values())
    for key, weights in weighed.of("rollout_is_weights").items():
        real = masks[key].bool()
        torch.testing.assert_close(weights[real], (raw[key] / mean)[real], rtol=1e-5, atol=1e-6)
    assert len({round(float(value), 4) for values in raw.values() for value in values}) > 10
    assert weighed.grad_norm != pytest.approx(live.update(stored).grad_norm, rel=1e-3)
    assert "rollout_is_weights" not in live.update(stored, fields=fields).fields

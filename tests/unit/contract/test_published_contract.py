"""A package of somebody else's, written to the published contract and installed from a wheel, runs unchanged."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflex_hooks import ConfigError, HookManager
from dataflex_verl.build import build_from_config
from dataflex_verl.core import REGISTRY, Actuator, Registry, Scorer, Selector, register_scorer
from dataflex_verl.core.config import validate_compat
from tests.wheels import install

sys.path.insert(0, str(Path(__file__).parent))
from acme_package import POINTS, build_wheel  # noqa: E402

SHORT_FORMS = {
    "select": ("acme_spread", {"power": 2.0}, "acme_above", {"limit": 0.2}),
    "reweight": ("acme_spread", {}, "acme_affine", {"slope": 2.0}),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("acme")
    target = folder / "site"
    install([build_wheel(folder)], target)
    return target


@pytest.fixture
def acme(site: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "acme_dataflex"]:
        del sys.modules[name]


def short_form(mechanism: str) -> dict[str, Any]:
    scorer, scorer_params, actuator, actuator_params = SHORT_FORMS[mechanism]
    return {
        "mechanism": mechanism,
        "scorer": {"name": scorer, "params": scorer_params},
        "actuator": {"name": actuator, "params": actuator_params},
        "warmup_step": 0,
    }


def run(block: dict[str, Any], batch: Any, ctx: Any, coefficients: Any) -> Any:
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert {row["distribution"] for row in manager.plan()} == {"dataflex-verl"}
    return manager.post_advantage(batch, ctx, coefficients)


def test_a_selector_and_a_scorer_run_by_name(acme, batches, ctx, token_mean):
    merged = run(short_form("select"), batches.groups([1, 0, 0, 0], [1, 1, 1, 1]), ctx, token_mean)
    assert merged.row_keep.tolist() == [True, False, False, False, False, False, False, False]


def test_a_reweighter_runs_by_name_and_is_normalised(acme, batches, ctx, token_mean):
    merged = run(short_form("reweight"), batches.groups([1, 0]), ctx, token_mean)
    assert torch.allclose(merged.weights, torch.ones(4))
    merged = run(short_form("reweight"), batches.groups([1, 0, 0]), ctx, token_mean)
    raw = torch.tensor([1 + 2 * 2 / 3, 1 + 2 / 3, 1 + 2 / 3]).repeat_interleave(2)
    assert torch.allclose(merged.weights, raw / raw.mean())


def test_padded_token_scores_and_a_reweighter_that_takes_any(acme, batches, ctx, token_mean):
    row = batches.Row
    rows = [row(uid="a", length=1, log_prob=-1.0), row(uid="a", session=1, length=3, log_prob=(-0.1, -2.0, -0.5))]
    block = {"mechanism": "reweight", "scorer": "acme_surprise", "actuator": "acme_affine"}
    merged = run(block, batches.build(rows), ctx, token_mean)
    raw = 2 - torch.tensor([-1.0, -0.1, -2.0, -0.5]).exp()
    assert torch.allclose(merged.weights, raw / raw.mean()) and merged.per_token


def test_components_mix_with_built_in_ones(acme, batches, ctx, token_mean):
    block = {
        "plugins": {
            "band": {"plugin": "select", "scorer": "acme_spread", "actuator": "threshold_band"},
            "boost": {"plugin": "reweight", "scorer": "reward_difficulty", "actuator": "acme_affine"},
        }
    }
    merged = run(block, batches.groups([1, 0], [0, 0]), ctx, token_mean)
    assert merged.row_keep.tolist() == [True, True, False, False]
    assert torch.allclose(merged.weights[:4], torch.tensor([4 / 3, 4 / 3, 2 / 3, 2 / 3]))


@pytest.mark.parametrize("name", ["acme_above", "acme_dataflex.components:Above"])
def test_module_and_class_work_as_names(acme, name):
    assert REGISTRY.get("selector", name).__name__ == "Above"


def test_the_mixer_imports_validates_and_answers_act(acme):
    block = {
        "mechanism": "mix",
        "scorer": {"name": "acme_spread"},
        "actuator": {"name": "acme_inverse", "params": {"floor": 0.1, "window": 4}},
        "update_step": 2,
    }
    scorer, mixer, meta = build_from_config(block, adv_estimator="grpo", runtime={"domains": ["math", "code"]})
    proportions = mixer.act({"math": 1.0, "code": 0.0}, None, counts={"math": 3, "code": 5}, step_id=1)
    assert proportions == pytest.approx([0.1 + 0.8 / 3, 0.1 + 0.8 * 2 / 3])
    assert (scorer.domains, mixer.window) == (["math", "code"], 4)
    assert meta == {
        "mechanism": "mix",
        "warmup_step": 0,
        "update_step": 2,
        "domains": ["math", "code"],
        "window": None,
    }
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert manager.mixes
    manager.start_domains(("code", "math"))
    # The order is that of the domains the run has.
    assert manager._entries["mix"].plugin.actuator.domains == ["code", "math"]


@pytest.mark.parametrize("mechanism", SHORT_FORMS)
def test_build_from_config_returns_scorer_actuator_and_the_rest(acme, mechanism):
    scorer, actuator, meta = build_from_config(short_form(mechanism), adv_estimator="grpo")
    assert isinstance(scorer, Scorer) and isinstance(actuator, Actuator)
    assert (scorer.name, actuator.name) == SHORT_FORMS[mechanism][::2]
    assert meta["mechanism"] == mechanism and meta["warmup_step"] == 0


def test_build_from_config_reports_everything_as_a_value_error():
    block = {"mechanism": "select", "scorer": "group_solve_rat", "actuator": {"name": "topk_fraction"}, "warmup": 1}
    block["actuator"]["params"] = {"fraction": 2}
    with pytest.raises(ValueError) as caught:
        build_from_config(block, adv_estimator="gae")
    assert [problem.setting for problem in caught.value.problems] == [
        "dataflex.warmup",
        "scorer.name",
        "actuator.params.fraction",
    ]
    with pytest.raises(ValueError, match="mechanism: got 'selekt'.*did you mean 'select'"):
        build_from_config({"mechanism": "selekt"})


def test_a_group_scorer_under_an_estimator_without_groups_is_a_value_error():
    class Groups(Scorer):
        needs_groups = True

        def score(self, batch, step_id, **ctx):
            return None

    for estimator in (None, "grpo", "GRPO", "rloo"):
        validate_compat(Groups(), adv_estimator=estimator)
    with pytest.raises(ValueError, match="Groups.*needs no groups.*adv_estimator=gae"):
        validate_compat(Groups(), adv_estimator="gae")
    block = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
    with pytest.raises(ValueError, match="group"):
        build_from_config(block, adv_estimator="gae")


def test_the_registry_builds_and_lists(registry):
    @register_scorer("acme_local")
    class Local(Scorer):
        def __init__(self, power=1, **kwargs):
            self.power, self.kwargs = power, kwargs

        def score(self, batch, step_id, **ctx):
            return batch.batch["advantages"].sum(-1)

    assert "acme_local" in REGISTRY.list("scorer") == REGISTRY.names("scorer")
    built = REGISTRY.build("scorer", "acme_local", runtime={"domains": ["a"]}, cfg={"power": 3})
    assert (built.power, built.kwargs) == (3, {"domains": ["a"]})
    assert REGISTRY.build("selector", "topk_fraction").fraction == 0.5
    with pytest.raises(ConfigError, match=r"params.powr: got 1; accepted: one of power; did you mean 'power'\?"):
        REGISTRY.build("scorer", "acme_local", cfg={"powr": 1})


def test_a_scorer_with_a_timing_or_granularity_that_does_not_exist_is_refused_at_its_class():
    with pytest.raises(ValueError, match=r"Late.timing = 'post_rewards'; accepted: one of .*; did you mean 'post_rew"):

        class Late(Scorer):
            timing = "post_rewards"

    with pytest.raises(ValueError, match="Wide.granularity = 'galaxy'; accepted: one of domain, prompt, "):

        class Wide(Scorer):
            granularity = "galaxy"


def test_the_entry_points_of_the_wheel_are_found(acme):
    from dataflex_hooks import discovery

    assert set(POINTS) <= set(discovery.entry_point_names())
    assert issubclass(Selector, Actuator)

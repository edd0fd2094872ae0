"""Routes on the real trainer: rewards, advantages and gradient of a domain change, the others' do not."""

from __future__ import annotations

import pytest
import torch

from tests.wheels import contrib_site

pytestmark = pytest.mark.real
FIELDS = ("rm_scores", "advantages", "response_mask")


@pytest.fixture(scope="module")
def router():
    with contrib_site().on_path():
        from dataflex_reward_router import RewardRouter

        yield RewardRouter


@pytest.fixture(scope="module")
def sources(stored) -> dict[str, str]:
    """Domain of each row by its key."""
    names = [str(getattr(name, "data", name)) for name in stored.fields["data_source"]]
    found = dict(zip(stored.keys, names, strict=True))
    assert len(set(names)) > 1
    return found


def test_only_the_routed_domain_changes(live, stored, router, sources):
    name = sorted(set(sources.values()))[0]
    plain = live.update(stored, fields=FIELDS)
    plugin = router({name: {"length_penalty": 0.2, "shift": 1.0}})
    routed = live.update(stored, plugins={"router": plugin}, fields=FIELDS)
    differ = set()
    for key, before in plain.of("rm_scores").items():
        after, length = routed.of("rm_scores")[key], int(plain.of("response_mask")[key].sum())
        change = 1.0 - 0.2 * length if sources[key] == name else 0.0
        assert float(after.sum()) == pytest.approx(float(before.sum()) + change, abs=1e-6)
        if not torch.equal(routed.of("advantages")[key], plain.of("advantages")[key]):
            differ.add(sources[key])
    assert differ == {name}
    assert routed.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
    share = sum(source != name for source in sources.values()) / len(sources)
    assert routed.metrics["dataflex/router/share:default"] == pytest.approx(share)


def test_a_route_that_nobody_takes_changes_no_bit(live, stored, router):
    plain = live.update(stored, fields=FIELDS)
    routed = live.update(stored, plugins={"router": router({"nobody": {"scale": 5.0}})}, fields=FIELDS)
    assert all(torch.equal(value, routed.of("rm_scores")[key]) for key, value in plain.of("rm_scores").items())
    assert routed.grad_norm == plain.grad_norm
    assert routed.metrics["dataflex/router/share:default"] == 1.0


def test_a_classifier_gets_the_messages_of_the_prompts(live, stored, router, monkeypatch):
    import sys
    import types

    module, asked = types.ModuleType("real_routes"), []

    def by_text(columns):
        asked.extend(columns["raw_prompt"])
        return ["long" if len(messages[0]["content"]) > 8 else "short" for messages in columns["raw_prompt"]]

    module.by_text = by_text
    monkeypatch.setitem(sys.modules, "real_routes", module)
    plugin = router({"long": {"shift": 1.0}, "short": {"shift": -1.0}}, classifier="real_routes:by_text")
    outcome = live.update(stored, plugins={"router": plugin}, fields=FIELDS)
    live.update(stored, plugins={"router": plugin}, fields=FIELDS)
    groups = {key.rsplit("_", 2)[0] for key in stored.keys}
    assert len(asked) <= len(groups) and isinstance(asked[0][0]["content"], str)
    metrics = outcome.metrics
    assert metrics["dataflex/router/share:long"] + metrics["dataflex/router/share:short"] == 1.0
    assert metrics["dataflex/reward_adjustment"] != 0.0

"""Two plugins of other packages that own the same decision: refused at start, both named with their distributions."""

from __future__ import annotations

import pytest

from dataflex_hooks import ConfigError, HookManager

GOOD = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
HOOK = {"rewards": "post_reward", "priority": "pre_rollout", "proportions": "on_domain_stats"}


def plugin(part: str) -> str:
    return f"""
        from dataflex_hooks import hookimpl

        class Owner:
            provides = {{{part!r}}}

            @hookimpl
            def {HOOK.get(part, "post_reward")}(self, ctx):
                return None
    """


@pytest.fixture
def two(distribution):
    """Install two packages, each with a plugin that provides ``part``."""

    def install(part: str) -> None:
        distribution("acme-first", {"first": "acme_first:Owner"}, {"acme_first": plugin(part)}, version="1.4")
        distribution("acme-second", {"second": "acme_second:Owner"}, {"acme_second": plugin(part)}, version="0.2b1")

    return install


@pytest.mark.parametrize("part", HOOK)
def test_a_manager_names_both_with_their_distributions(two, part):
    two(part)
    with pytest.raises(ConfigError) as caught:
        HookManager.from_config(
            {"plugins": {"first": {}, "b": {"plugin": "second"}}}, estimator="grpo", has_groups=True
        )
    (problem,) = caught.value.problems
    assert str(problem) == (
        f"dataflex.plugins.b: got {part} from 'b' (acme-second 0.2b1) and 'first' (acme-first 1.4); "
        f"accepted: one plugin that provides {part}; remove one of the two"
        + (", or let one adjust: scale and shift" if part == "rewards" else "")
    )


@pytest.mark.parametrize("part", HOOK)
def test_check_names_both_with_their_distributions_and_starts_nothing(two, dataflex, part):
    two(part)
    result = dataflex("check", *GOOD, "+dataflex.plugins.first.plugin=first", "+dataflex.plugins.second.plugin=second")
    assert result.exit_code == 2
    assert f"{part} from 'second' (acme-second 0.2b1) and 'first' (acme-first 1.4)" in result.output
    assert dataflex("check", *GOOD, "+dataflex.plugins.first.plugin=first").exit_code == 0


def test_two_that_share_a_decision_are_let_in(two, dataflex):
    two("reward_scale")
    result = dataflex("check", *GOOD, "+dataflex.plugins.first.plugin=first", "+dataflex.plugins.second.plugin=second")
    assert result.exit_code == 0, result.output
    assert "rm_scores, verl's own, times the scales of first and second" in result.output

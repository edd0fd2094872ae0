"""``assert_plugin_contract``: a plugin that breaks a property fails by its name, its neighbour that keeps it passes."""

from __future__ import annotations

import pickle

import pytest
import torch

import dataflex_hooks as df
from dataflex_hooks.testing import (
    PROPERTIES,
    ContractError,
    assert_plugin_contract,
    make_context,
    make_groups,
    random_batch,
)
from tests.unit.kit import bad_plugins as bad

EXTRA = {"post_advantage": ("extra_fields",)}

BROKEN = {
    "registration": [bad.Misspelt, bad.SavesWithoutLoading],
    "decisions": [
        *map(bad.weights, (bad.of_a_wrong_shape, bad.of_complex_numbers, bad.as_a_list, bad.not_finite)),
        *map(bad.weights, (bad.below_zero, bad.of_an_undeclared_field, bad.that_raises)),
        *map(bad.update, (bad.of_graded_masks, bad.of_another_hook)),
        bad.OfTooManyShares,
        bad.OfTooManyCandidates,
        bad.OfHalfAdmitted,
        bad.SetsOthersProportions,
        bad.UndeclaredPart,
    ],
    "mutation": [
        bad.update(bad.that_halves_advantages_in_place),
        bad.update(bad.that_halves_them_through_numpy),
        bad.update(bad.that_writes_into_a_column, EXTRA),
        bad.ThatSortsCandidates,
        bad.ThatWritesIntoStatistics,
        bad.ObservesAndChanges,
    ],
    "acts": [bad.NeverDecides],
    "determinism": [
        *map(bad.weights, (bad.from_torchs_global_generator, bad.from_numpys_global_generator)),
        *map(bad.weights, (bad.from_pythons_global_generator, bad.from_an_unseeded_generator)),
        bad.MixesAtRandom,
    ],
    "rows": [
        bad.weights(bad.by_position),
        bad.update(bad.of_the_first_half),
        bad.update(bad.with_ties_by_position),
        bad.ThatAdmitsTheFirst,
        bad.RewardsByPosition,
        bad.RewardsOnATokenByPosition,
        bad.ShiftsByPosition,
        bad.DropsByPosition,
    ],
    "uids": [bad.weights(bad.by_uid)],
    "padding": [
        *map(bad.weights, (bad.that_averages_over_padding, bad.that_sums_over_tools)),
        bad.RewardsOnATokenByPadding,
    ],
    "state": [
        *(bad.Remembers, bad.SavesHalf, bad.LoadsNothing, bad.SavesWhatCannotBeStored, bad.FailsToLoad),
        bad.MixesByAllSteps,
    ],
}
KEPT = [
    bad.weights(bad.from_seed_and_step),
    bad.update(bad.with_ties_by_content, {"post_advantage": ("rm_scores", "responses", "prompts")}),
    bad.weights(bad.by_group),
    bad.ThatAdmitsEvenRows,
    bad.ThatAddsARowToFailedGroups,
    bad.weights(bad.that_sums_padded_tokens_of_the_model),
    bad.weights(bad.that_averages_over_valid_tokens),
    bad.weights(bad.that_is_padded_itself),
    bad.weights(bad.that_is_as_wide_as_the_longest_response),
    bad.RemembersAndSaves,
    bad.ByReward,
    bad.RewardsByLength,
    bad.RewardsOnTheFirstToken,
    bad.ShiftsByLength,
    bad.MixesByAllStepsAndSaves,
]
CASES = [(name, plugin) for name, plugins in BROKEN.items() for plugin in plugins]


def name_of(case):
    return getattr(case, "__name__", case)


@pytest.mark.parametrize(("broken", "plugin"), CASES, ids=name_of)
def test_a_broken_property_is_named(broken, plugin):
    with pytest.raises(ContractError, match=f"^{name_of(plugin)} breaks") as caught:
        assert_plugin_contract(plugin)
    assert caught.value.broken == (broken,)
    assert PROPERTIES[broken] in str(caught.value)


@pytest.mark.parametrize("plugin", KEPT, ids=name_of)
def test_a_plugin_that_keeps_the_contract_passes(plugin):
    assert_plugin_contract(plugin)


def test_every_property_has_a_plugin_that_breaks_it():
    assert list(BROKEN) == list(PROPERTIES)


def test_rows_added_to_the_first_group_depend_on_order_and_names():
    with pytest.raises(ContractError, match="added rows: 1 and 1, of which 0 are the same") as caught:
        assert_plugin_contract(bad.ThatAddsTheFirstRow)
    assert caught.value.broken == ("rows",)


def test_the_message_says_step_row_and_values():
    with pytest.raises(ContractError) as caught:
        assert_plugin_contract(bad.update(bad.of_the_first_half))
    first, second, third = str(caught.value).splitlines()
    assert first == "of_the_first_half breaks the contract of a plugin:"
    assert second.startswith("  rows: with rows and candidates in another order, on step 1 (groups of 4): kept: row ")
    assert second.endswith("True and False") or second.endswith("False and True")
    assert third.strip() == PROPERTIES["rows"]
    assert pickle.loads(pickle.dumps(caught.value)).broken == ("rows",)


def test_a_plugin_object_is_copied_and_left_as_it_is():
    plugin = bad.RemembersAndSaves()
    assert_plugin_contract(plugin)
    assert plugin.steps == 0


def test_what_cannot_be_copied_asks_for_a_function():
    plugin = bad.ByReward()
    plugin.file = open(__file__)  # noqa: SIM115
    with pytest.raises(df.ParameterError, match="a class, or a function that makes the plugin"):
        assert_plugin_contract(plugin)
    plugin.file.close()


def test_a_property_can_be_left_out():
    assert_plugin_contract(bad.weights(bad.by_uid), skip=("uids",))
    with pytest.raises(df.ParameterError, match="did you mean 'uids'"):
        assert_plugin_contract(bad.NeverDecides, skip=("uid",))
    with pytest.raises(df.ParameterError, match="a tuple of"):
        assert_plugin_contract(bad.NeverDecides, skip="uids")


class Judge:
    requires = {"pre_rollout": ("level",), "post_advantage": ("judge",)}

    @df.hookimpl
    def pre_rollout(self, candidates, ctx):
        return df.RolloutDecision(admit=torch.from_numpy(candidates.columns["level"] > 1))

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(weights=torch.from_numpy(batch.column("judge").astype(float)))


def test_columns_of_ones_own_are_given_by_what_to_draw_from():
    assert_plugin_contract(Judge, columns={"level": [1, 2]}, row_columns={"judge": [0.5, 2.0]})
    with pytest.raises(df.ParameterError, match=r"without level; accepted: .*columns=\{'level': \[...\]\}"):
        assert_plugin_contract(Judge, row_columns={"judge": [0.5]})
    with pytest.raises(df.ParameterError, match="groups of 4, without judge"):
        assert_plugin_contract(Judge, columns={"level": [1, 2]})


class Guard:
    @df.hookimpl
    def post_advantage(self, batch, ctx):
        high = ctx.last_metrics.get("actor/ppo_kl", 0.0) > 0.95
        return df.UpdateDecision(update_scale=0.5) if high else None


def test_own_batches_and_contexts_are_used():
    batches = [random_batch(7), random_batch(8)]
    with pytest.raises(ContractError, match="acts: nothing was decided on any of 4 steps: its hooks returned None"):
        assert_plugin_contract(Guard, batches=batches)
    contexts = [make_context(step, metrics={"actor/ppo_kl": 0.3 * step}) for step in range(1, 5)]
    assert_plugin_contract(Guard, batches=batches, contexts=contexts)


class KeepShort:
    def __init__(self, longest=256):
        self.longest = longest

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=batch.lengths <= self.longest)


class AdmitsAll:
    @df.hookimpl
    def pre_rollout(self, candidates, ctx):
        return df.RolloutDecision(admit=torch.ones(len(candidates), dtype=torch.bool)) if ctx.step > 2 else None


def test_decisions_that_change_nothing_are_told_from_none_and_a_batch_that_is_suggested_helps():
    with pytest.raises(ContractError) as caught:
        assert_plugin_contract(KeepShort)
    assert caught.value.broken == ("acts",)
    assert caught.value.found["acts"] == (
        "post_advantage gave mask on 10 of 10 steps, and all of it is what happens without the plugin: every row "
        "stays, with its weight and reward, and every candidate is admitted. Give input on which it acts, such as "
        "batches=[make_groups([1.0, 0.0], lengths=[[3, 400]])]; responses here have up to 12 tokens"
    )
    assert_plugin_contract(KeepShort, batches=[make_groups([1.0, 0.0], lengths=[[3, 400]])])
    assert_plugin_contract(lambda: KeepShort(longest=4))
    with pytest.raises(ContractError, match=r"acts: pre_rollout gave admit on 8 of 10 steps, .*such as prompts=make_"):
        assert_plugin_contract(AdmitsAll)


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (bad.Misspelt, "  registration: Misspelt: got @hookimpl on post_advantages, which is no hook"),
        (lambda: KeepShort, "  registration: KeepShort: got the class "),
        ({"plugin": "selct"}, "  registration: plugin: got 'selct'; accepted: the name of an installed plugin"),
        (
            {
                "plugin": "select",
                "scorer": "reward_difficulty",
                "actuator": {"name": "topk_fraction", "params": {"k": 1}},
            },
            "  registration: actuator.params.k: got 1; accepted: one of fraction, largest",
        ),
    ],
)
def test_what_a_run_refuses_is_told_in_words_that_the_author_wrote(plugin, said):
    with pytest.raises(ContractError) as caught:
        assert_plugin_contract(plugin)
    assert said in str(caught.value) and "dataflex.plugins" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": []}, r"batches: got \[\]; accepted: at least one batch"),
        ({"contexts": [make_context(1)]}, "contexts: got 1 contexts; accepted: 10 contexts, two for each batch"),
        ({"batches": [random_batch(7)], "contexts": [make_context(1)]}, "accepted: 2 contexts, two for each batch"),
        ({"domains": []}, "domains: got .*a list of names, at least one"),
        ({"domains": "math"}, "domains: got 'math'; accepted: a list of names"),
    ],
)
def test_inputs_that_make_no_steps_are_refused(given, message):
    with pytest.raises(df.ParameterError, match=message):
        assert_plugin_contract(KeepsOneOfTwo, **given)


class ReadsPaddingOnceItHasDecided:
    """Looks at padding only in a batch that has been made anew, with its rewards or without some rows."""

    requires = {"post_advantage": ("advantages",)}
    provides = {"rewards", "keep", "weights"}

    def __init__(self, decide):
        self.decide = decide

    @df.hookimpl
    def post_reward(self, batch):
        return self.decide(batch)

    @df.hookimpl
    def post_advantage(self, batch):
        touched = bool((batch.session_number > 0).all()) or "rewards" in self.decide.__name__
        padded = batch.batch["advantages"].abs() + 1.0 * (batch.batch["advantages"] != 0)
        size = padded.mean(dim=1) if touched else batch.sum_over_tokens(batch.values("advantages")).abs()
        return df.UpdateDecision(weights=size + 0.1, normalize="none")


def new_rewards(batch):
    return df.RewardDecision(rewards=2 * batch.rewards)


def fewer_rows(batch):
    return df.RewardDecision(keep=batch.session_number > 0, advantages="kept")


@pytest.mark.parametrize("decide", [new_rewards, fewer_rows])
def test_padding_is_wider_after_rewards_and_drops_too(decide):
    with pytest.raises(ContractError) as caught:
        assert_plugin_contract(lambda: ReadsPaddingOnceItHasDecided(decide))
    assert caught.value.broken == ("padding",)


class KeepsOneOfTwo:
    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=batch.session_number == 0, update_scale=0.5)


def test_rules_of_a_run_are_applied():
    assert_plugin_contract(KeepsOneOfTwo, config={"mask_scale": "kept"})
    with pytest.raises(ContractError, match="registration: dataflex.mask_scale: got 'keep'"):
        assert_plugin_contract(KeepsOneOfTwo, config={"mask_scale": "keep"})


def test_a_failure_is_found_whatever_the_block_says_of_failures():
    config = {"on_error": "disable", "warmup_step": 100}
    with pytest.raises(ContractError) as caught:
        assert_plugin_contract(bad.weights(bad.that_raises), config=config)
    assert caught.value.broken == ("decisions",)
    assert_plugin_contract(KeepsOneOfTwo, config=config)
    with pytest.raises(ContractError, match="registration: dataflex.on_error: got 'ignore'"):
        assert_plugin_contract(KeepsOneOfTwo, config={"on_error": "ignore"})


def test_rewards_on_other_tokens_are_said_with_row_token_and_values():
    with pytest.raises(ContractError, match=r"rewards: row \d+ \(uid .*\), token \d+: ") as caught:
        assert_plugin_contract(bad.RewardsOnATokenByPosition)
    assert caught.value.broken == ("rows",)

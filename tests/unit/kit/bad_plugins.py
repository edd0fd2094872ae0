"""Plugins that each break one property of the contract, beside the closest ones that keep it."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch

import dataflex_hooks as df

hookimpl = df.hookimpl
READS = {"post_advantage": ("advantages", "old_log_probs", "rm_scores")}


def update(decide: Any, requires: Any = READS) -> type:
    """A plugin class whose ``post_advantage`` returns ``decide(plugin, batch, ctx)``."""

    class Plugin:
        def __init__(self) -> None:
            self.seen = 0.0
            self.numbers = np.random.default_rng(0)

        @hookimpl
        def post_advantage(self, batch, ctx):
            return decide(self, batch, ctx)

    Plugin.requires = requires
    Plugin.__name__ = decide.__name__
    return Plugin


def weights(decide: Any) -> type:
    """The same, for a decision that is weights."""

    def decided(plugin, batch, ctx):
        return df.UpdateDecision(weights=decide(plugin, batch, ctx), normalize="none")

    decided.__name__ = decide.__name__
    return update(decided)


# ---------------------------------------------------------------- decisions


def of_a_wrong_shape(plugin, batch, ctx):
    return torch.ones(batch.bs + 1)


def of_complex_numbers(plugin, batch, ctx):
    return torch.ones(batch.bs, dtype=torch.complex64)


def as_a_list(plugin, batch, ctx):
    return [1.0] * batch.bs


def not_finite(plugin, batch, ctx):
    return batch.mean_over_tokens(batch.values("advantages")) / 0.0


def below_zero(plugin, batch, ctx):
    return batch.mean_over_tokens(batch.values("advantages"))


def of_graded_masks(plugin, batch, ctx):
    return df.UpdateDecision(mask=torch.full((batch.bs,), 0.5))


def of_another_hook(plugin, batch, ctx):
    return df.RewardDecision(keep=batch.rewards > 0)


def of_an_undeclared_field(plugin, batch, ctx):
    return batch.values("entropy")


def that_raises(plugin, batch, ctx):
    return {}["missing"]


# ---------------------------------------------------------------- mutation


def that_halves_advantages_in_place(plugin, batch, ctx):
    batch.values("advantages").mul_(0.5)


def that_halves_them_through_numpy(plugin, batch, ctx):
    batch.values("advantages").numpy()[:] *= 0.5


def that_writes_into_a_column(plugin, batch, ctx):
    for fields in batch.column("extra_fields"):
        fields["seen"] = True


class ThatSortsCandidates:
    @hookimpl
    def pre_rollout(self, candidates, ctx):
        candidates.dataset_rows.sort()
        return df.RolloutDecision(admit=torch.from_numpy(candidates.dataset_rows % 2 == 0))


class ThatWritesIntoStatistics:
    provides = {"proportions"}

    @hookimpl
    def on_domain_stats(self, stats, ctx):
        stats.scores["reward"][:] += 1.0
        return df.DomainDecision(proportions=torch.from_numpy(stats.scores["reward"] / stats.scores["reward"].sum()))


# ---------------------------------------------------------------- determinism


def from_torchs_global_generator(plugin, batch, ctx):
    return torch.rand(batch.bs)


def from_numpys_global_generator(plugin, batch, ctx):
    return torch.from_numpy(np.random.rand(batch.bs))


def from_pythons_global_generator(plugin, batch, ctx):
    return torch.full((batch.bs,), random.random())


def from_an_unseeded_generator(plugin, batch, ctx):
    return torch.full((batch.bs,), np.random.default_rng().random())


def from_seed_and_step(plugin, batch, ctx):
    return torch.full((batch.bs,), np.random.default_rng((ctx.seed, ctx.step)).random())


# ---------------------------------------------------------------- rows and uids


def by_position(plugin, batch, ctx):
    return torch.arange(batch.bs) / batch.bs


def of_the_first_half(plugin, batch, ctx):
    return df.UpdateDecision(mask=torch.arange(batch.bs) < batch.bs // 2)


def with_ties_by_position(plugin, batch, ctx):
    mask = torch.zeros(batch.bs, dtype=torch.bool)
    mask[torch.sort(batch.rewards, descending=True, stable=True).indices[: batch.bs // 2]] = True
    return df.UpdateDecision(mask=mask)


def with_ties_by_content(plugin, batch, ctx):
    order = np.lexsort((batch.tie_rank.numpy(), -batch.rewards.numpy()))
    mask = torch.zeros(batch.bs, dtype=torch.bool)
    mask[torch.from_numpy(order[: batch.bs // 2])] = True
    return df.UpdateDecision(mask=mask)


def by_uid(plugin, batch, ctx):
    return (batch.group + 1) / batch.n_groups


def by_group(plugin, batch, ctx):
    return batch.expand_groups(batch.per_group(batch.session_rewards))


class ThatAdmitsTheFirst:
    @hookimpl
    def pre_rollout(self, candidates, ctx):
        return df.RolloutDecision(admit=torch.arange(len(candidates)) < 3)


class ThatAdmitsEvenRows:
    @hookimpl
    def pre_rollout(self, candidates, ctx):
        return df.RolloutDecision(admit=torch.from_numpy(candidates.dataset_rows % 2 == 0))


class ThatAddsTheFirstRow:
    """A row of the group that stands first in the batch."""

    @hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(add=[df.AddedRow("2 + 2 =", "4", 1.0, uid=batch.uid[0])])


class ThatAddsARowToFailedGroups:
    requires = {"post_reward": ("rm_scores",)}

    @hookimpl
    def post_reward(self, batch, ctx):
        solved = batch.expand_groups(batch.per_group(batch.session_rewards)) > 0.4
        failed = sorted({str(uid) for uid, is_solved in zip(batch.uid, solved, strict=True) if not is_solved})
        return df.RewardDecision(add=[df.AddedRow("2 + 2 =", "4", 1.0, uid=uid) for uid in failed])


# ---------------------------------------------------------------- padding


def that_averages_over_padding(plugin, batch, ctx):
    return batch.batch["advantages"].abs().mean(dim=1)


def that_sums_over_tools(plugin, batch, ctx):
    sums = torch.zeros(batch.bs, dtype=torch.float64)
    return sums.index_add_(0, batch.row_of_token, batch.values("old_log_probs").double().abs())


def that_sums_padded_tokens_of_the_model(plugin, batch, ctx):
    return (batch.batch["old_log_probs"].abs() * batch.batch["response_mask"]).sum(dim=1)


def that_averages_over_valid_tokens(plugin, batch, ctx):
    return batch.mean_over_tokens(batch.values("old_log_probs").abs())


def that_is_padded_itself(plugin, batch, ctx):
    return batch.batch["old_log_probs"].abs()


def that_is_as_wide_as_the_longest_response(plugin, batch, ctx):
    return torch.ones(batch.bs, int(batch.lengths.max())) * 0.5


# ---------------------------------------------------------------- state


class Remembers:
    """Weighs by the mean reward so far."""

    requires = {"post_advantage": ("rm_scores",)}

    def __init__(self) -> None:
        self.total, self.steps = 0.0, 0

    @hookimpl
    def post_advantage(self, batch, ctx):
        self.total += float(batch.rewards.double().sort().values.mean())
        self.steps += 1
        weight = 0.5 + self.total / self.steps
        return df.UpdateDecision(weights=torch.full((batch.bs,), weight), normalize="none")


class RemembersAndSaves(Remembers):
    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.total, self.steps = state["total"], state["steps"]


class SavesHalf(RemembersAndSaves):
    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


class LoadsNothing(RemembersAndSaves):
    def load_state_dict(self, state: Any) -> None:
        pass


class SavesWhatCannotBeStored(RemembersAndSaves):
    def state_dict(self) -> dict[str, Any]:
        return {"recent": collections.deque([self.total])}


class FailsToLoad(RemembersAndSaves):
    def load_state_dict(self, state: Any) -> None:
        self.total = state["sum"]


class SavesWithoutLoading(Remembers):
    def state_dict(self) -> dict[str, Any]:
        return {}


# ---------------------------------------------------------------- other


class NeverDecides:
    @hookimpl
    def post_advantage(self, batch, ctx):
        return None


class Misspelt:
    @hookimpl
    def post_advantages(self, batch, ctx):
        return None


class OfTooManyShares:
    provides = {"proportions"}

    @hookimpl
    def on_domain_stats(self, stats, ctx):
        return df.DomainDecision(proportions=torch.full((len(stats.domains) + 1,), 0.3))


class ByReward:
    """Proportions by reward."""

    provides = {"proportions"}

    @hookimpl
    def on_domain_stats(self, stats, ctx):
        share = stats.scores["reward"] + 0.1
        return df.DomainDecision(proportions=torch.from_numpy(share / share.sum()))


class RewardsByPosition:
    provides = {"rewards"}

    @hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(rewards=torch.arange(batch.bs) / 10)


class RewardsByLength:
    provides = {"rewards", "keep"}
    requires = {"post_reward": ("rm_scores",)}

    @hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(rewards=batch.rewards - batch.n_valid / 100, keep=batch.rewards > 0)


class RewardsPerToken:
    """Each row's reward on one of its tokens: the sums are the same, wherever that is."""

    provides = {"rewards"}
    requires = {"post_reward": ("rm_scores",)}

    def place(self, batch):
        raise NotImplementedError

    @hookimpl
    def post_reward(self, batch, ctx):
        rewards = torch.zeros(batch.n_tokens)
        rewards[batch.offsets[:-1] + self.place(batch) % batch.lengths] = batch.rewards
        return df.RewardDecision(rewards=rewards)


class RewardsOnATokenByPosition(RewardsPerToken):
    def place(self, batch):
        return torch.arange(batch.bs)


class RewardsOnATokenByPadding(RewardsPerToken):
    def place(self, batch):
        return batch.batch["rm_scores"].shape[1] - batch.lengths


class RewardsOnTheFirstToken(RewardsPerToken):
    def place(self, batch):
        return torch.zeros(batch.bs, dtype=torch.int64)


class UndeclaredPart:
    provides = {"mask"}

    @hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(weights=torch.ones(batch.bs))


class OfTooManyCandidates:
    @hookimpl
    def pre_rollout(self, candidates, ctx):
        return df.RolloutDecision(admit=torch.ones(len(candidates) + 1, dtype=torch.bool))


class OfHalfAdmitted:
    @hookimpl
    def pre_rollout(self, candidates, ctx):
        return df.RolloutDecision(priority=torch.full((len(candidates),), float("nan")))


class ShiftsByPosition:
    provides = {"reward_shift"}

    @hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(shift=torch.arange(batch.bs) / 10)


class ShiftsByLength:
    provides = {"reward_shift"}

    @hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(shift=-batch.n_valid / 100)


class DropsByPosition:
    @hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(keep=torch.arange(batch.bs) >= 2)


class MixesAtRandom:
    provides = {"proportions"}

    @hookimpl
    def on_domain_stats(self, stats, ctx):
        share = torch.rand(len(stats.domains)) + 0.1
        return df.DomainDecision(proportions=share / share.sum())


class MixesByAllSteps:
    """The mean reward of all steps, which a resumed run has forgotten."""

    provides = {"proportions"}

    def __init__(self) -> None:
        self.total = np.zeros(2)

    @hookimpl
    def on_domain_stats(self, stats, ctx):
        self.total = self.total + stats.scores["reward"]
        share = self.total + 0.1
        return df.DomainDecision(proportions=torch.from_numpy(share / share.sum()))


class MixesByAllStepsAndSaves(MixesByAllSteps):
    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class ObservesAndChanges(ByReward):
    observes = "post_reward"

    def observe(self, batch, ctx):
        batch.values("rm_scores").add_(1.0)


class SetsOthersProportions(ByReward):
    def start(self, domains):
        return [0.5] * (len(domains) + 1)

"""The four hooks. Signatures and contracts only; everything runs in the trainer process, never in a worker.

A plugin implements any of them with :data:`dataflex_hooks.hookimpl` and may leave out arguments it does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dataflex_hooks.batch import DomainStats, PromptBatch, RolloutBatch
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import DomainDecision, RewardDecision, RolloutDecision, UpdateDecision
from dataflex_hooks.markers import hookspec


@hookspec
def pre_rollout(candidates: PromptBatch, ctx: StepContext) -> RolloutDecision | None:
    """Decide which candidate prompts are worth generating for.

    Fires when candidate prompts have been drawn from the dataset, before they are fetched, tokenised and submitted to
    rollout; for refills and asynchronous warm-up too. Runs in the trainer process.

    Args:
        candidates: n prompts as dataset rows, with domains and static columns, each (n,).
        ctx: step, local update, mode, estimator, the previous step's metrics.

    Returns:
        A RolloutDecision: ``admit`` masks are combined with AND; ``priority`` and ``rollouts`` have one owner each.
        None admits every candidate, in the order drawn, with the configured number of rollouts. A refused candidate is
        passed over until its domain's stream wraps; one admitted and not chosen comes back first. ``rollouts`` is not
        applied yet.
        ``metrics`` of any decision are logged as ``dataflex/<label>/<name>``.

    Raises:
        Anything: stops the run with the plugin's label, distribution, hook and step.

    Example::

        class SkipLongPrompts:
            requires = {"pre_rollout": ("prompt_length",)}

            @hookimpl
            def pre_rollout(self, candidates, ctx):
                length = torch.from_numpy(candidates.columns["prompt_length"])
                return RolloutDecision(admit=length < 2048)

    Since: 0.1.
    """


@hookspec
def post_reward(batch: RolloutBatch, ctx: StepContext) -> RewardDecision | None:
    """Replace or adjust rewards, drop rows, add rows.

    Fires when the rewards of all rollouts of the step are known, before verl balances the batch and before any log-prob
    pass. Runs in the trainer process.

    Args:
        batch: bs rows of T response tokens: rewards (``rm_scores``, raw outcome before KL), ``response_mask``, uid,
            lengths, and the fields and dataset columns that the plugin lists in ``requires["post_reward"]``. Read-only.
        ctx: step, local update, mode, estimator, the previous step's metrics.

    Returns:
        A RewardDecision. New rewards, (bs,) or per token, come in place of the old. One owner: the plugin says
        ``provides = {"rewards"}``, two that do are refused at start. The owner runs first, and the plugins that adjust
        (``provides = {"reward_scale", "reward_shift"}``) see its rewards: ``scale`` and ``shift``, each (bs,), of all
        of them make ``reward * product of scales + sum of shifts``. The others see the rewards that come out.
        A row stays in the batch if every plugin's ``keep`` says so; every plugin sees all rows, whatever another drops.
        Rows to ``add`` are taken from all plugins, in order of their labels; they are trained on with the advantages
        they bring, and no plugin sees them. None changes nothing.
        ``metrics`` of any decision are logged as ``dataflex/<label>/<name>``.

    Raises:
        Anything: stops the run with the plugin's label, distribution, hook and step.

    Example::

        class HalveRewards:
            provides = {"reward_scale"}

            @hookimpl
            def post_reward(self, batch, ctx):
                return RewardDecision(scale=torch.full((batch.bs,), 0.5))

    Since: 0.1.
    """


@hookspec
def post_advantage(batch: RolloutBatch, ctx: StepContext) -> UpdateDecision | None:
    """Decide which responses or tokens enter the update, and how much each counts.

    Fires when advantages have been computed, before the critic and the actor are updated. Runs in the trainer process.

    Args:
        batch: bs rows of T response tokens: ``response_mask``, uid, lengths, and the fields and dataset columns that
            the plugin lists in ``requires["post_advantage"]`` (``advantages``, ``old_log_probs``, ``rm_scores``, ...).
            Padding rows are absent. Read-only.
        ctx: step, local update, mode, estimator, the previous step's metrics.

    Returns:
        An UpdateDecision. Masks are combined with AND, and so is ``keep``, where False takes the row out of the batch.
        Weights multiply, and those to be normalised are divided so that the kept weights average 1 under the
        coefficients of the configured loss; ``update_scale`` multiplies; ``skip_update`` of any plugin skips the
        update. The result does not depend on the order of plugins. None changes nothing.
        ``metrics`` of any decision are logged as ``dataflex/<label>/<name>``.

    Raises:
        Anything: stops the run with the plugin's label, distribution, hook and step.

    Example::

        class MaskUnrewarded:
            requires = {"post_advantage": ("rm_scores",)}

            @hookimpl
            def post_advantage(self, batch, ctx):
                return UpdateDecision(mask=batch.rewards > 0, reason="no reward")

    Since: 0.1.
    """


@hookspec
def on_domain_stats(stats: DomainStats, ctx: StepContext) -> DomainDecision | None:
    """Set the proportions in which domains are sampled next.

    Fires at the end of a step, before a checkpoint is written, when ``step >= warmup_step`` and
    ``step % update_step == 0``. Runs in the trainer process.

    Args:
        stats: counts and scores of the step's sessions by domain, each (K,), dropped and evicted ones included.
        ctx: step, local update, mode, estimator, the previous step's metrics.

    Returns:
        A DomainDecision: K proportions, in force from the very next prompt. One owner. None keeps the proportions.
        Besides the hook a plugin may have ``start(domains)``, called once before the first prompt, which may return
        proportions to begin with; and ``observes`` (``"post_reward"`` or ``"post_advantage"``) with ``observe(batch,
        ctx)``, called there in every step, warm-up included, with all rows and those that verl's filter evicted.
        ``metrics`` of any decision are logged as ``dataflex/<label>/<name>``.

    Raises:
        Anything: stops the run with the plugin's label, distribution, hook and step.

    Example::

        class Uniform:
            provides = {"proportions"}

            @hookimpl
            def on_domain_stats(self, stats, ctx):
                k = len(stats.domains)
                return DomainDecision(proportions=torch.full((k,), 1 / k))

    Since: 0.1.
    """


HOOKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pre_rollout": ("candidates", "ctx"),
        "post_reward": ("batch", "ctx"),
        "post_advantage": ("batch", "ctx"),
        "on_domain_stats": ("stats", "ctx"),
    },
)
"""Argument names of every hook."""

CALLED = frozenset({"pre_rollout", "post_reward", "post_advantage", "on_domain_stats"})
"""The hooks that this version's trainer calls."""

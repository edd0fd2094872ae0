"""The second part of the catalogue of errors: what a run says of a plugin that misbehaves."""

from __future__ import annotations

from collections.abc import Callable

RUNNING = """\
## While running

A plugin's exception stops the run and says which plugin of which package failed in which hook and step; the plugin's
own traceback is chained.

`on_error: disable`, on a plugin or under `dataflex` for all, logs the failure once at ERROR, with the same words, and
the run goes on as if the plugin were not there: rewards are verl's own or what other plugins make of them, all
candidate prompts are admitted, domains keep the proportions last in force. The metric `dataflex/<label>/disabled` is 1
from then on. After resuming the plugin stays out; `dataflex.resume=fresh` brings it back, with all plugins starting
afresh. It is for what goes wrong while the run goes on and is one plugin's own:

- an exception in a hook, in `observe`, `scorer_means` or `state_dict`;
- a decision that cannot be used: another type, shape, value or part than is accepted, decisions per token that the loss
  cannot follow, weights, scales or adjustments of rewards that leave the range of float32 on their own, added rows that
  no batch can hold. Nothing of the plugin's decision in that hook is applied;
- a field that it `requires` and the batch does not have.

These stop the run in any case:

- a failure at start: the constructor, `start`, `load_state_dict`, and every error of the configuration above;
- a batch changed in place: other plugins read it too, and what it held before is gone;
- decisions that go wrong only together, so that nobody is at fault: a product of weights and scales, or adjustments of
  rewards, beyond float32; two plugins that drop rows and want advantages over different ones;
- what the settings of the run rule out, whoever decides it: dropped or added rows under
  `actor_rollout_ref.actor.shuffle` or `critic.shuffle`, `advantages="group"` with an estimator that has none, added
  rows beside fields of the rollout that they cannot have, too few admitted prompts with `on_starved: error`.

A call that takes longer than `slow_plugin_seconds` (30 by default; per plugin or under `dataflex`; null for no limit)
is named in a WARNING, while it is still running; see [troubleshooting](troubleshooting.md).
"""
RUNNING_ENTRIES: tuple[tuple[str, str, str, str], ...] = (
    (
        "Weights that are no weights",
        "nan",
        "The plugin returned NaN, an infinity or a negative number.",
        "Return finite numbers that are not negative; 0 masks.",
    ),
    ("A mask that is no mask", "mask", "Graded values in a mask.", "Return them as `weights`."),
    ("A batch changed in place", "mutation", "Batches are shared by all plugins.", "Work on `tensor.clone()`."),
    ("A field that was not asked for", "field", "Only declared fields are fetched.", "List it in `requires`."),
    (
        "A signal that the reward function does not return",
        "signal",
        "`signal` names a key of the dict that the reward function returns.",
        "Use one that is there, or return it.",
    ),
    ("A part that was not declared", "part", "`provides` tells the host what may clash.", "Add it to `provides`."),
    (
        "A state that cannot be stored",
        "state",
        "Checkpoints hold JSON and safetensors, never pickles.",
        "Return dicts, lists, tuples, numbers, strings, numpy arrays and tensors from `state_dict`.",
    ),
    (
        "A checkpoint of other plugins",
        "resume",
        "State would be lost, or a plugin would start in the middle without any.",
        "Resume with the plugins of the checkpoint, or say with `dataflex.resume` that the difference is meant.",
    ),
)


def running_message(case: str) -> str:
    """What a run says when a plugin misbehaves in one of the ways of RUNNING_ENTRIES."""
    import torch

    from dataflex_hooks import HookManager, LossCoefficients, PluginError, RolloutBatch, StepContext, UpdateDecision
    from dataflex_hooks.signals import session_signal

    decide: dict[str, Callable[[RolloutBatch], UpdateDecision]] = {
        "nan": lambda batch: UpdateDecision(weights=torch.full((batch.bs,), torch.nan)),
        "mask": lambda batch: UpdateDecision(mask=torch.full((batch.bs,), 0.5)),
        "mutation": lambda batch: UpdateDecision(mask=batch.values("rm_scores").mul_(0) == 0),
        "field": lambda batch: UpdateDecision(weights=batch.values("old_log_probs")),
        "signal": lambda batch: UpdateDecision(weights=batch.expand_sessions(session_signal(batch, "format"))),
        "part": lambda batch: UpdateDecision(skip_update=True),
    }
    if case in ("state", "resume"):
        return _state_message(case)
    ones = torch.ones(4)
    fields = {"response_mask": ones.long(), "rm_scores": ones.clone(), "advantages": ones.clone()}
    columns = {"extra_fields": [{"reward_extra_info": {"acc": 1.0}}, {"reward_extra_info": {"acc": 0.0}}]}
    batch = RolloutBatch(["a_0_0", "a_1_0"], torch.tensor([0, 2, 4]), columns, fields)
    manager = HookManager({"mine": _plugin(decide[case])})
    try:
        manager.post_advantage(batch, StepContext(step=7), LossCoefficients("token"))
    except PluginError as error:
        return str(error)
    raise AssertionError(f"{case} raised nothing")


def _state_message(case: str) -> str:
    from dataflex_hooks import ConfigError, HookManager, PluginError, hookimpl

    class Mine:
        seen: object = frozenset({1})

        @hookimpl
        def post_advantage(self, batch: object) -> None:
            return None

        def state_dict(self) -> dict[str, object]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.seen = state["seen"]

    plugin = Mine()
    Mine.__module__, Mine.__qualname__ = "mine", "Mine"
    manager = HookManager({"mine": plugin})
    try:
        if case == "resume":
            plugin.seen = 1
            saved = manager.state_dict(7)
            HookManager({"other": Mine()}).load_state_dict(saved, 7, "checkpoints/global_step_7")
        manager.state_dict(7)
    except (PluginError, ConfigError) as error:
        return str(error)
    raise AssertionError(f"{case} raised nothing")


def _plugin(decide: Callable[..., object]) -> object:
    from dataflex_hooks import hookimpl

    class Mine:
        provides = frozenset({"mask", "weights"})

        @hookimpl
        def post_advantage(self, batch: object) -> object:
            return decide(batch)

    return Mine()

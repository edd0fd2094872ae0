"""Does the configured loss do with a weight what a weight means? Asked of verl's own loss function at start.

A loss may ignore the importance weights (``bypass_mode``), or use them so that a weight per token is no factor on that
token (``geo_mean``). Reading the mode's name would trust every version and every user-registered loss, so this module
calls the real function on a few random rows and looks at the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict

from dataflex_hooks import LossCoefficients
from dataflex_verl.losses import ApplyTo, ConfiguredLoss, ProbeResult, judge

_LENGTHS = (3, 7, 2, 5, 4)
_PROMPT = 2
_SEED = 20240611
_TRIALS = 3
_TOLERANCE = 1e-5

Gradient = Callable[[torch.Tensor], torch.Tensor]


def check_loss(config: DictConfig, apply_to: ApplyTo = "weights") -> LossCoefficients:
    """Probe the configured actor loss.

    Args:
        config: verl's whole configuration.
        apply_to: whether decisions will be written as loss weights or multiplied into the advantages.

    Returns:
        The coefficients under which weights are normalised, and whether decisions per token are possible.

    Raises:
        ConfigError: decisions could not reach the optimizer as written; says which setting to change.
    """
    loss = ConfiguredLoss.of(config)
    # A name that verl does not know would end in a traceback of verl's.
    names = loss.name_problems(known_modes())
    return judge(config, names, lambda: loss.coefficients(probe(config, apply_to), apply_to))


def known_modes() -> list[str]:
    """Loss modes in verl's registry, those that users registered among them."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return sorted(POLICY_LOSS_REGISTRY)


def probe(config: DictConfig, apply_to: ApplyTo = "weights") -> ProbeResult:
    """Measure additivity of the policy-loss gradient in the weight field, without KL and entropy terms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        total = sum(_LENGTHS)
        actor = _policy_only(config)
        gradient = _gradient_function(actor, apply_to)
        rows = torch.tensor(_LENGTHS)

        def field() -> torch.Tensor:
            return torch.rand(total, dtype=torch.float64) * 2 * (torch.rand(total) > 0.4)

        def row_field() -> torch.Tensor:
            values = torch.rand(len(_LENGTHS), dtype=torch.float64) * 2 * (torch.rand(len(_LENGTHS)) > 0.4)
            return values.repeat_interleave(rows)

        zero = gradient(torch.zeros(total, dtype=torch.float64))
        one = gradient(torch.ones(total, dtype=torch.float64))
        return ProbeResult(
            per_token=all(_additive(gradient, field(), field()) for _ in range(_TRIALS)),
            per_response=all(_additive(gradient, row_field(), row_field()) for _ in range(_TRIALS)),
            ignored=bool(zero.norm() > _TOLERANCE * one.norm()),
            coefficients=_coefficients(actor, apply_to),
            divides_by_rows=_divides_by_rows(actor, apply_to, one),
        )


def _additive(gradient: Gradient, first: torch.Tensor, second: torch.Tensor) -> bool:
    whole = gradient(first + second)
    apart = gradient(first) + gradient(second)
    return bool((whole - apart).norm() <= _TOLERANCE * whole.norm().clamp(min=1e-12))


def _coefficients(actor: Any, apply_to: ApplyTo) -> Literal["token", "sequence"] | None:
    """The gradient on policy with equal advantages is, up to a constant, the coefficient of each token."""
    total = sum(_LENGTHS)
    gradient = _gradient_function(actor, apply_to, on_policy=True)(torch.ones(total, dtype=torch.float64)).abs()
    norm = gradient.sum()
    if not norm > 0:
        return None
    lengths = torch.tensor(_LENGTHS)
    per_sequence = (1.0 / lengths.double() / len(_LENGTHS)).repeat_interleave(lengths)
    candidates = {"token": torch.full((total,), 1.0 / total, dtype=torch.float64), "sequence": per_sequence}
    for kind, expected in candidates.items():
        if torch.allclose(gradient / norm, expected, rtol=1e-4, atol=0):
            return kind  # type: ignore[return-value]
    return None


def _divides_by_rows(actor: Any, apply_to: ApplyTo, one: torch.Tensor) -> bool:
    """Whether twice as many rows in the mini-batch, padding all of them, halve the gradient."""
    ones = torch.ones(sum(_LENGTHS), dtype=torch.float64)
    torch.manual_seed(_SEED)
    halved = _gradient_function(actor, apply_to, rows=2 * len(_LENGTHS))(ones)
    return bool((2 * halved - one).norm() <= _TOLERANCE * one.norm())


def _gradient_function(actor: Any, apply_to: ApplyTo, on_policy: bool = False, rows: int = len(_LENGTHS)) -> Gradient:
    """Gradient of verl's ``ppo_loss`` with respect to the response log-probabilities, as a function of the weights."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    total, bs = sum(_LENGTHS), len(_LENGTHS)
    lengths = torch.tensor(_LENGTHS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sequence_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + _PROMPT).cumsum(0)])
    # Wide enough that clipping and clip_cov's covariance window (1, 5) both occur among the tokens.
    old = -4.0 * torch.rand(total, dtype=torch.float64) - 0.1
    current = old.clone() if on_policy else old + 0.3 * torch.randn(total, dtype=torch.float64)
    advantages = torch.ones(total, dtype=torch.float64) if on_policy else 2.0 * torch.randn(total, dtype=torch.float64)
    # Position of each response token's log-probability: verl reads it one place to the left.
    start = (sequence_offsets[:-1] + _PROMPT - 1).repeat_interleave(lengths)
    place = start + torch.arange(total) - offsets[:-1].repeat_interleave(lengths)

    def jagged(values: torch.Tensor, at: torch.Tensor = offsets) -> torch.Tensor:
        # tensordict pads a jagged tensor without cached lengths to its total length.
        longest, shortest = int(at.diff().max()), int(at.diff().min())
        return torch.nested.nested_tensor_from_jagged(values, at, min_seqlen=shortest, max_seqlen=longest)

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        leaf = current.clone().requires_grad_(True)
        log_probs = torch.zeros(int(sequence_offsets[-1]), dtype=torch.float64).index_put((place,), leaf)
        fields = {
            "prompts": jagged(torch.ones(bs * _PROMPT, dtype=torch.int64), torch.arange(0, bs + 1) * _PROMPT),
            "responses": jagged(torch.ones(total, dtype=torch.int64)),
            "response_mask": jagged(torch.ones(total, dtype=torch.int64)),
            "old_log_probs": jagged(old),
            "advantages": jagged(advantages if apply_to == "weights" else advantages * weights),
        }
        if apply_to == "weights":
            fields["rollout_is_weights"] = jagged(weights)
        data = TensorDict(fields, batch_size=bs)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=total, global_batch_size=rows)
        # clip_cov draws random tokens; every call must see the same draw.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            loss, _ = ppo_loss(actor, {"log_probs": jagged(log_probs, sequence_offsets)}, data)
        (result,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        return torch.zeros_like(current) if result is None else result

    return gradient


def _policy_only(config: DictConfig) -> Any:
    """verl's actor configuration with KL and entropy off; they do not depend on the weights."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True))
    with open_dict(actor):
        actor.use_kl_loss = False
        actor.entropy_coeff = 0.0
        actor.calculate_entropy = False
    return omega_conf_to_dataclass(actor)

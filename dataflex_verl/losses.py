"""What verl's loss modes do with weights, known without importing verl; the probe asks verl the same and must agree.

A table and not a rule: it holds for the loss modes that verl itself registers. For any other the run's start-up probe
decides.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks import ConfigError, LossCoefficients, Problem
from dataflex_hooks.errors import did_you_mean, one_of

ApplyTo = Literal["weights", "advantages"]

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
LOSS_AGG_MODE = "actor_rollout_ref.actor.loss_agg_mode"
ESTIMATOR = "algorithm.adv_estimator"

AGGREGATIONS: dict[str, Literal["token", "sequence"]] = {
    "token-mean": "token",
    "token-sum": "token",
    "seq-mean-token-sum": "token",
    "seq-mean-token-sum-norm": "token",
    "seq-mean-token-mean": "sequence",
}
"""verl's loss aggregations, and what each weighs alike."""

LOSS_MODES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
)
"""verl's own loss modes."""

ESTIMATORS = (
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
"""verl's own advantage estimators."""

# grop is grpo misspelled; grpo_v2 may be a name of the user's own.
_ALIKE = 0.75
_AVERAGE_PER_RESPONSE = frozenset({"sapo", "geo_mean"})
_NOT_PER_TOKEN = frozenset({"geo_mean"})
_IGNORED = {"weights": frozenset({"bypass_mode"}), "advantages": frozenset({"kl_cov", "dro"})}
_NOT_LINEAR = {"weights": _IGNORED["weights"], "advantages": frozenset({"clip_cov", "kl_cov", "dro"})}


@dataclass(frozen=True)
class ProbeResult:
    """What a loss does with weights.

    Attributes:
        per_token: gradients add up over weight fields that differ from token to token.
        per_response: they add up over fields that are constant within a response.
        ignored: all weights 0 leave a gradient.
        coefficients: ``token`` or ``sequence`` as in LossCoefficients, None if neither describes the loss.
        divides_by_rows: as in LossCoefficients.
    """

    per_token: bool
    per_response: bool
    ignored: bool
    coefficients: Literal["token", "sequence"] | None
    divides_by_rows: bool = False


@dataclass(frozen=True)
class ConfiguredLoss:
    """The configured pair of loss mode and aggregation."""

    mode: str
    aggregation: str

    @classmethod
    def of(cls, config: DictConfig) -> ConfiguredLoss:
        """Read verl's whole configuration."""
        mode = OmegaConf.select(config, LOSS_MODE, default="vanilla")
        aggregation = OmegaConf.select(config, LOSS_AGG_MODE, default="token-mean")
        return cls(str(mode), str(aggregation))

    def name_problems(self, modes: Iterable[str] = LOSS_MODES) -> list[Problem]:
        """Say so if verl has no such aggregation, or if the loss mode is a misspelled one of ``modes``."""
        modes = list(modes)
        problems = []
        if (meant := misspelled(self.mode, modes)) is not None:
            problems.append(Problem(LOSS_MODE, self.mode, one_of(modes), f"did you mean {meant!r}?"))
        if self.aggregation not in AGGREGATIONS:
            hint = did_you_mean(self.aggregation, AGGREGATIONS)
            problems.append(Problem(LOSS_AGG_MODE, self.aggregation, one_of(AGGREGATIONS), hint))
        return problems

    def known(self) -> bool:
        """Whether the table has this pair."""
        return self.mode in LOSS_MODES and self.aggregation in AGGREGATIONS

    def expected(self, apply_to: ApplyTo) -> ProbeResult:
        """Return what the table says of a known pair."""
        linear = self.mode not in _NOT_LINEAR[apply_to]
        return ProbeResult(
            per_token=linear and self.mode not in _NOT_PER_TOKEN,
            per_response=linear,
            ignored=self.mode in _IGNORED[apply_to],
            coefficients="sequence" if self.mode in _AVERAGE_PER_RESPONSE else AGGREGATIONS[self.aggregation],
            divides_by_rows=self.mode == "sapo"
            or (self.mode != "geo_mean" and self.aggregation.startswith("seq-mean")),
        )

    def coefficients(self, result: ProbeResult, apply_to: ApplyTo) -> LossCoefficients:
        """Return the coefficients under which weights are normalised.

        Raises:
            ConfigError: decisions could not reach the optimizer as written; says which setting to change.
        """
        problems = self._refusals(result, apply_to)
        if problems:
            raise ConfigError(problems)
        assert result.coefficients is not None
        source = f"loss_mode={self.mode}, loss_agg_mode={self.aggregation}"
        return LossCoefficients(
            kind=result.coefficients,
            per_token=result.per_token,
            divides_by_rows=result.divides_by_rows,
            source=source,
        )

    def _refusals(self, result: ProbeResult, apply_to: ApplyTo) -> list[Problem]:
        other = "dataflex.apply_to=advantages" if apply_to == "weights" else "dataflex.apply_to=weights"
        if result.ignored or not result.per_response:
            what = "weights" if apply_to == "weights" else "a factor on the advantages"
            why = (
                f"a masked response would still get gradient, since this loss does not multiply {what} in"
                if result.ignored
                else f"this loss is not linear in {what}, so a decision would not act as written"
            )
            accepted = f"a loss that is linear in {what} (vanilla, ...): {why}"
            return [Problem(LOSS_MODE, self.mode, accepted, f"or try {other}")]
        if result.coefficients is None:
            accepted = "a loss that averages over tokens, or over responses and then tokens: weights are normalised so"
            return [Problem(LOSS_MODE, self.mode, accepted)]
        return []


def expect_loss(config: DictConfig, apply_to: ApplyTo = "weights") -> LossCoefficients:
    """Do what the start-up probe does, from the table.

    A loss mode that is not verl's own gives the coefficients of its aggregation, with a source that says so: the run
    probes it.

    Raises:
        ConfigError: as the probe does.
    """
    loss = ConfiguredLoss.of(config)

    def ask() -> LossCoefficients:
        if loss.known():
            return loss.coefficients(loss.expected(apply_to), apply_to)
        source = f"loss_mode={loss.mode} is not verl's own: the run asks it at the start"
        return LossCoefficients(
            kind=AGGREGATIONS[loss.aggregation],
            divides_by_rows=loss.aggregation.startswith("seq-mean"),
            source=source,
        )

    return judge(config, loss.name_problems(), ask)


def judge(config: DictConfig, names: list[Problem], ask: Callable[[], LossCoefficients]) -> LossCoefficients:
    """Return what ``ask`` finds, unless something is wrong: with the algorithm's settings, ``names``, or the loss.

    Raises:
        ConfigError: with all of it.
    """
    problems = setting_problems(config) + names
    if not names:
        try:
            coefficients = ask()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return coefficients


def misspelled(given: str, names: Iterable[str]) -> str | None:
    """Return the entry of ``names`` that ``given`` is probably a misspelling of.

    None where it is one of them, or may be a name that the user's own modules register with verl.
    """
    names = list(names)
    plugins = [point for point in entry_points(group="verl.plugins") if not point.value.startswith("dataflex_verl")]
    if given in names or plugins or os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        return None
    return next(iter(difflib.get_close_matches(given, names, n=1, cutoff=_ALIKE)), None)


def setting_problems(config: DictConfig) -> list[Problem]:
    """Settings of verl's algorithm under which decisions would go to the wrong rows."""
    if not OmegaConf.select(config, "algorithm.use_pf_ppo", default=False):
        return []
    accepted = "false: verl's v1 trainer pairs its resampled rows with other rows' advantages"
    return [Problem("algorithm.use_pf_ppo", True, accepted)]


def estimator_of(config: DictConfig) -> tuple[str, list[Problem]]:
    """Return the run's estimator; for a misspelled one the one that was meant, and the problem."""
    given = str(OmegaConf.select(config, ESTIMATOR))
    meant = misspelled(given, ESTIMATORS)
    if meant is None:
        return given, []
    return meant, [Problem(ESTIMATOR, given, one_of(ESTIMATORS), f"did you mean {meant!r}?")]

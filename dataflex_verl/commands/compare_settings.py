"""Settings that the arms of a comparison have otherwise: some are refused, and all others outside ours are listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflex_verl.analysis.conditions import SettingDifference
from dataflex_verl.commands.demo_plan import BadOption
from dataflex_verl.local.settings import override_key
from dataflex_verl.modes import MODE, MODES

if TYPE_CHECKING:
    from omegaconf import DictConfig

BUDGET = (
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "trainer.total_training_steps",
    "algorithm.filter_groups.enable",
)
"""Settings that decide how many rollouts a run generates: equal in all arms."""

VALIDATION = (
    "data.val_files",
    "data.val_max_samples",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.prompt_key",
    "data.reward_fn_key",
    "data.custom_cls",
    "data.apply_chat_template_kwargs",
    "actor_rollout_ref.rollout.val_kwargs",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.multi_turn",
    "reward.custom_reward_function",
    "reward.reward_kwargs",
    "reward.reward_manager",
    "reward.reward_model",
    "actor_rollout_ref.model.path",
)
"""Settings, or whole blocks of them, that decide what is measured and where a run starts: equal in all arms."""

NOTHING = "nothing"
VERLS = "verl's default"
_OURS = "dataflex"
_OF_THE_FOLDER = ("trainer.default_local_dir", "trainer.experiment_name", "ray_kwargs")


def refuse_unequal(configs: Mapping[str, DictConfig]) -> None:
    """Refuse arms that differ in their budget, in what they start from or in what they are measured by.

    Args:
        configs: composed configurations by arm, the baseline first, all of one seed.

    Raises:
        BadOption: naming the setting and both arms.
    """
    (first, base), *others = configs.items()
    for setting in (*BUDGET, *VALIDATION):
        alike = "generate the same number of rollouts" if setting in BUDGET else "be measured alike"
        wanted = _selected(base, setting)
        for name, config in others:
            for one in _differences(wanted, _selected(config, setting)):
                accepted = "nothing of it" if one.baseline == NOTHING else one.baseline
                raise BadOption(
                    f"--arm {name}: got {one.setting}={one.value}; accepted: {accepted}, as {first} has: arms have to "
                    f"{alike}"
                )


def other_settings(configs: Mapping[str, DictConfig]) -> dict[str, tuple[SettingDifference, ...]]:
    """By arm but the first, what it has otherwise than the first, ``dataflex`` and the mode that goes with it left out.

    Args:
        configs: composed configurations by arm, the baseline first, all of one seed.
    """
    from omegaconf import OmegaConf

    # Unresolved: what follows from another setting is no difference of its own.
    plain = {name: dict(_leaves(OmegaConf.to_container(config, resolve=False))) for name, config in configs.items()}
    (_, base), *others = plain.items()
    return {name: tuple(_outside_ours(_differences(base, given))) for name, given in others}


def other_overrides(base: Sequence[str], given: Sequence[str]) -> tuple[SettingDifference, ...]:
    """The same of two runs' overrides: what neither sets cannot be seen, and need not."""
    settings = {
        override_key(text): NOTHING if text.startswith("+") and text[:2] != "++" else VERLS for text in (*base, *given)
    }
    one, other = ({**settings, **values_of(overrides)} for overrides in (base, given))
    found = _outside_ours(_differences(one, other))
    return tuple(one for one in found if canonical(one.value) != canonical(one.baseline))


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Settings of overrides, as text."""
    return {
        override_key(text): NOTHING if text.startswith("~") else text.partition("=")[2].strip("'\"")
        for text in overrides
    }


def canonical(text: str) -> str:
    """The value of an override in one spelling: ``True`` is ``true``, ``1`` is ``1.0``, ``[a,b]`` is ``['a', b]``."""
    # It comes with Hydra, and is wanted only where runs are gathered.
    import yaml

    try:
        return repr(_spelt(yaml.safe_load(text)) if text else text)
    except (yaml.YAMLError, ValueError):
        return repr(text)


def _spelt(value: Any) -> Any:
    if isinstance(value, list):
        return [_spelt(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _spelt(entry) for key, entry in value.items()}
    try:
        # YAML takes 1e-3 for text.
        number = float(value) if isinstance(value, (str, float)) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _outside_ours(differences: Iterator[SettingDifference]) -> Iterator[SettingDifference]:
    for one in differences:
        top = one.setting.split(".")[0]
        if top == _OURS or one.setting.startswith(_OF_THE_FOLDER):
            continue
        if one.setting == MODE and _verl_mode(one.value) == _verl_mode(one.baseline):
            continue
        yield one


def _verl_mode(mode: str) -> str:
    return "sync" if mode == VERLS else MODES.get(mode, mode)


def _selected(config: DictConfig, setting: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    value = OmegaConf.select(config, setting)
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return dict(_leaves(plain, setting))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from _leaves(inside, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _differences(base: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[SettingDifference]:
    for setting in sorted({*base, *given}):
        one, other = base.get(setting, NOTHING), given.get(setting, NOTHING)
        if one != other:
            yield SettingDifference(setting, _text(other), _text(one))


def _text(value: Any) -> str:
    return "null" if value is None else str(value)

"""The resolved plan of a run, in words: the same lines in the run's log and from ``dataflex check``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from dataflex_hooks import HookManager, LossCoefficients
from dataflex_hooks.metric_names import label_metric
from dataflex_verl.estimators import why_no_group_advantages
from dataflex_verl.losses import ESTIMATOR, LOSS_AGG_MODE, LOSS_MODE
from dataflex_verl.plan_parts import part_lines
from dataflex_verl.versions import package_versions

PREFIX = "DataFlex plan: "
PLAN_KEY = "dataflex_plan"
"""Where the run's configuration, and so every logger that stores it, keeps the plan."""

# What every run shows, and what it shows only where it is switched on.
_SETTINGS = (ESTIMATOR, "actor_rollout_ref.rollout.n", LOSS_MODE, LOSS_AGG_MODE)
_SWITCHES: Mapping[str, str] = {
    "algorithm.rollout_correction.rollout_is": "verl's importance weights: ours are multiplied in",
    "algorithm.rollout_correction.rollout_rs": "verl's rejection mask: normalisation comes after it",
    "actor_rollout_ref.actor.use_kl_loss": "the KL term sees masked responses",
    "actor_rollout_ref.actor.entropy_coeff": "the entropy term sees masked responses",
    "algorithm.use_kl_in_reward": "advantages come from rewards less KL, scorers see the raw reward",
    "critic.enable": "the critic learns from masked responses too",
}
_WEIGHS = frozenset({"mask", "weights", "update_scale"})
_BEFORE_ROLLOUT = frozenset({"pre_rollout", "on_domain_stats"})
_OF_DOMAINS = ("prop", "proposed", "generated", "trained", "reward")
_MERGED = ("kept_frac", "weight_mean", "weight_largest", "ess_frac", "reward_all", "reward_kept")


def plan_lines(hooks: HookManager, coefficients: LossCoefficients, config: DictConfig | None = None) -> list[str]:
    """What will run: a line a plugin in call order, and below it indented ones with the parameters in force; then how
    decisions merge, where they land and what is logged.

    Args:
        hooks: the plugins of the run.
        coefficients: of the configured loss.
        config: verl's whole configuration, for the settings that matter; without it they are left out.
    """
    if not hooks.labels:
        return [f"{PREFIX}no plugin; the run is verl's own"]
    rows = hooks.plan()
    settings = hooks.config
    weighs = any(_WEIGHS.intersection(row["provides"]) for row in rows)
    applied = f"applied to {settings.apply_to}" if weighs else "applied"
    if not settings.apply:
        applied = "shadow mode: decided and logged, nothing changed"
    scale = f", mask_scale={settings.mask_scale}" if weighs else ""
    lines = [f"{len(rows)} plugin(s), {applied}{scale}"]
    for row in rows:
        lines += [_plugin_line(row), *part_lines(row)]
    lines += _merge_lines(rows, coefficients, settings.mask_scale)
    lines += _landing_lines(rows, settings.apply_to, "lands in" if settings.apply else "would land in")
    lines += _drop_lines(rows, hooks, coefficients, config)
    lines += _domain_lines(rows, hooks)
    if config is not None:
        lines.append(f"verl settings that matter: {', '.join(_verl_settings(config))}")
    lines.append(f"logs: {', '.join(_metric_names(rows))}")
    return [PREFIX + line for line in lines]


def plan_data(hooks: HookManager, coefficients: LossCoefficients, config: DictConfig) -> dict[str, Any]:
    """The plan in plain values, with the lines of :func:`plan_lines`."""
    return {
        "plugins": hooks.plan(),
        "apply": hooks.config.apply,
        "apply_to": hooks.config.apply_to,
        "mask_scale": hooks.config.mask_scale,
        "coefficients": {
            "kind": coefficients.kind,
            "per_token": coefficients.per_token,
            "source": coefficients.source,
        },
        "verl_settings": _verl_settings(config) if hooks.labels else [],
        "metrics": _metric_names(hooks.plan()) if hooks.labels else [],
        "lines": plan_lines(hooks, coefficients, config),
    }


def store_plan(config: DictConfig, lines: list[str]) -> None:
    """Keep the plan with the metrics: in the configuration that loggers store, and beside verl's own JSONL file.

    The file has the versions of the packages beside it.
    """
    with open_dict(config):
        config[PLAN_KEY] = list(lines)
    loggers = OmegaConf.select(config, "trainer.logger", default=[])
    if "file" not in ([loggers] if isinstance(loggers, str) else list(loggers or [])):
        return
    metrics = metrics_file(config)
    metrics.parent.mkdir(parents=True, exist_ok=True)
    for suffix, stored in ((".plan.json", lines), (".versions.json", package_versions())):
        metrics.with_suffix(suffix).write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def metrics_file(config: DictConfig) -> Path:
    """Where verl's ``file`` logger writes."""
    if path := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    root = Path(os.path.expanduser(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")))
    return root / str(config.trainer.project_name) / f"{config.trainer.experiment_name}.jsonl"


def _plugin_line(row: Mapping[str, Any]) -> str:
    pair = " -> ".join(name for name in (row["scorer"], row["actuator"]) if name)
    source = f"{row['distribution']} {row['version']}" if row["distribution"] else row["plugin"]
    normalised = {"mean": ", normalised", "none": ", as they are"}.get(row["normalize"] or "", "")
    acts_on_rows = row["scorer"] and not _BEFORE_ROLLOUT.intersection(row["hooks"])
    per = f" per {'token' if row['per_token'] else 'response'}" if acts_on_rows else ""
    gives = "provides" if row["declares"] else "has no `provides`, so may give"
    return (
        f"{row['label']} = {row['plugin']}{f' {pair}' if pair else ''} at {', '.join(row['hooks'])}"
        f" from step {row['warmup_step']} ({source}), {gives} {', '.join(row['provides'])}{per}{normalised}"
        f"{', on_error=disable' if row['on_error'] == 'disable' else ''}"
    )


def _merge_lines(rows: list[dict[str, Any]], coefficients: LossCoefficients, mask_scale: str) -> list[str]:
    masks = _providers(rows, "mask")
    weights = [row["label"] for row in rows if "weights" in row["provides"] and row["normalize"] == "mean"]
    either = [row["label"] for row in rows if "weights" in row["provides"] and row["normalize"] is None]
    raw = [row["label"] for row in rows if "weights" in row["provides"] and row["normalize"] == "none"]
    parts = []
    if masks:
        scaled = ", made up for by 1/(kept share)" if mask_scale == "kept" else ""
        parts.append(f"keep what {' and '.join(masks)} keep{'s' if len(masks) == 1 else ''}{scaled}")
    if weights:
        parts.append(f"multiply the weights of {' and '.join(weights)}, normalised over what is kept")
    if either:
        unless = "normalised over what is kept unless a decision says otherwise"
        parts.append(f"multiply the weights of {' and '.join(either)}, {unless}")
    if raw:
        parts.append(f"then multiply the weights of {' and '.join(raw)} as they are")
    if scales := _providers(rows, "update_scale"):
        parts.append(f"multiply by update_scale of {' and '.join(scales)}")
    if skips := _providers(rows, "skip_update"):
        parts.append(f"no update when {' or '.join(skips)} says so")
    lines = [f"merge: {'; '.join(parts)}"] if parts else []
    if weights or either:
        lines.append(f"normalised weights average 1 per {coefficients.kind} ({coefficients.source})")
    elif masks and mask_scale == "kept":
        lines.append(f"shares are counted per {coefficients.kind} ({coefficients.source})")
    return lines


def _landing_lines(rows: list[dict[str, Any]], apply_to: str, lands: str) -> list[str]:
    lines = []
    owners, scales, shifts = (_providers(rows, part) for part in ("rewards", "reward_scale", "reward_shift"))
    if owners or scales or shifts:
        made = [f"from {owners[0]}" if owners else "verl's own"]
        made += [f"times the scales of {' and '.join(scales)}"] if scales else []
        made += [f"plus the shifts of {' and '.join(shifts)}"] if shifts else []
        lines.append(f"{lands}: rm_scores, {', '.join(made)}; advantages are computed from them")
    if any("post_advantage" in row["hooks"] and _WEIGHS.intersection(row["provides"]) for row in rows):
        field = "rollout_is_weights, a factor on each token's policy-gradient term"
        if apply_to == "advantages":
            field = "advantages, multiplied; returns stay as they are"
        lines.append(f"{lands}: {field}; KL, entropy and the critic are left alone")
    return lines


def _drop_lines(
    rows: list[dict[str, Any]], hooks: HookManager, coefficients: LossCoefficients, config: DictConfig | None
) -> list[str]:
    """Where drops happen, over which rows advantages are computed, and what happens when too few are left."""
    dropping = [row for row in rows if row["effect"] == "drop"]
    rules = hooks.config.keep_rules
    lines = []
    for hook, place in (("post_reward", "before the log-prob passes"), ("post_advantage", "before the updates")):
        labels = [row["label"] for row in dropping if hook in row["hooks"]]
        if labels:
            effect = f"leave the batch {place}, and with it KL, entropy and the critic"
            if not hooks.config.apply:
                effect = f"would leave the batch {place}"
            lines.append(f"drop: rows that {' or '.join(labels)} does not keep {effect}")
    early = [row for row in dropping if "post_reward" in row["hooks"]]
    if early:
        over = next((row["advantages"] for row in early if row["advantages"]), None)
        if over is None and config is not None:
            over = "kept" if why_no_group_advantages(config) else "group"
        lines.append(f"advantages: over {'the rows kept' if over == 'kept' else 'the whole group'}")
    if dropping and coefficients.divides_by_rows:
        lines.append(f"mini-batches with padding are filled up by a factor of at most {hooks.config.max_fill:g}")
    if dropping or rules.min_keep is not None:
        least = 1 if rules.min_keep is None else rules.min_keep
        lines.append(f"fewer than {least} rollout(s) left: {rules.fallback}")
    return lines


def _domain_lines(rows: list[dict[str, Any]], hooks: HookManager) -> list[str]:
    """Which domains there are, where proportions land, and what becomes of candidates that are not admitted."""
    if not (hooks.mixes or hooks.draws):
        return []
    listed = hooks.configured_domains()
    key = hooks.config.shared.get("domain_key")
    column = f"column {key}" if key else "column domain, else data_source"
    lines = [f"domains: {', '.join(listed) if listed else 'all that the training data has'}, by {column}"]
    if owners := _providers(rows, "proportions"):
        every = "every step" if hooks.config.update_step == 1 else f"every {hooks.config.update_step} steps"
        effect = f"in force from the next prompt on, decided anew {every}"
        lands = "lands in" if hooks.config.apply else "would land in"
        lines.append(
            f"{lands}: the domain sampler, from {owners[0]}; {effect if hooks.config.apply else 'logged only'}"
        )
    if labels := [row["label"] for row in rows if "pre_rollout" in row["hooks"]]:
        starved = "the best refused ones are taken" if hooks.config.on_starved == "take" else "the run stops"
        passed = "are passed over until their domain's next epoch"
        lines.append(f"prompts that {' or '.join(labels)} refuses {passed}; with too few left {starved}")
    return lines


def _verl_settings(config: DictConfig) -> list[str]:
    shown = [f"{name}={OmegaConf.select(config, name)}" for name in _SETTINGS]
    for name, effect in _SWITCHES.items():
        value = OmegaConf.select(config, name)
        if value:
            shown.append(f"{name}={value} ({effect})")
    return shown


def _metric_names(rows: list[dict[str, Any]]) -> list[str]:
    decides = any("post_advantage" in row["hooks"] for row in rows)
    names = [f"dataflex/{name}" for name in _MERGED] if decides else []
    if _providers(rows, "reward_scale") or _providers(rows, "reward_shift"):
        names.append("dataflex/reward_adjustment")
    if any(row["effect"] == "drop" and "post_reward" in row["hooks"] for row in rows):
        names.append("dataflex/dropped_frac")
    for row in rows:
        if {"mask", "keep"} & set(row["provides"]):
            names.append(label_metric(row["label"], "kept_frac"))
        if "weights" in row["provides"]:
            names.append(label_metric(row["label"], "weight_mean"))
        adjusting = sorted({"reward_scale", "reward_shift"} & set(row["provides"]))
        names += [label_metric(row["label"], part) for part in adjusting]
    if any(_BEFORE_ROLLOUT.intersection(row["hooks"]) for row in rows):
        names += [f"dataflex/{name}_<domain>" for name in _OF_DOMAINS]
    return names


def _providers(rows: list[dict[str, Any]], part: str) -> list[str]:
    return [row["label"] for row in rows if part in row["provides"]]

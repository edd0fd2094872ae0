"""Wrong configurations and everything that is wrong with each: one entry a problem, as ``setting: part of its text``.

A case is a list of overrides after GOOD, and may bring a YAML file. Presets, plain keys and Hydra's own rules alike.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTOR = "actor_rollout_ref.actor"
N = "actor_rollout_ref.rollout.n"
MODE = "trainer.v1.trainer_mode"
GOOD = (f"{MODE}=dataflex_sync", "algorithm.adv_estimator=grpo", f"{N}=8")
PER = "dataflex.plugins.per"
BAND = "dataflex.plugins.difffilter"


@dataclass(frozen=True)
class Wrong:
    """A wrong configuration.

    Attributes:
        name: of the case.
        overrides: after those of GOOD.
        problems: setting, and a part of the text, of each problem in order.
        yaml: content of a configuration file that starts from verl's.
    """

    name: str
    overrides: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    yaml: str = ""


def short(scorer: str = "group_solve_rate", actuator: str = "threshold_band", mechanism: str = "select") -> tuple:
    return (
        f"+dataflex.mechanism={mechanism}",
        f"+dataflex.scorer.name={scorer}",
        f"+dataflex.actuator.name={actuator}",
    )


CASES = (
    # ---- typos
    Wrong("mechanism", short(mechanism="selct"), (("dataflex.mechanism", "did you mean 'select'?"),)),
    Wrong("scorer", short("group_solve_rat"), (("dataflex.scorer.name", "did you mean 'group_solve_rate'?"),)),
    Wrong("actuator", short(actuator="treshold_band"), (("dataflex.actuator.name", "did you mean 'threshold_band'?"),)),
    Wrong(
        "parameter",
        (*short(), "+dataflex.scorer.params.succes_threshold=0.5"),
        (("dataflex.scorer.params.succes_threshold", "did you mean 'success_threshold'?"),),
    ),
    Wrong(
        "top key", (*short(), "+dataflex.warmup_steps=1"), (("dataflex.warmup_steps", "did you mean 'warmup_step'?"),)
    ),
    Wrong(
        "params forgotten",
        (*short(), "+dataflex.actuator.low=0.1"),
        (("dataflex.actuator.low", "parameters of the selector go under params"),),
    ),
    Wrong(
        "preset",
        ("+dataflex=diffilter",),
        (("dataflex", "got 'diffilter'; accepted: the name of a preset, one of ar"),),
    ),
    Wrong("trainer mode", (f"{MODE}=dataflex_snyc", "+dataflex=per"), ((MODE, "did you mean 'dataflex_sync'?"),)),
    Wrong(
        "verl's own key",
        ("+dataflex=per", "trainer.total_epoch=3"),
        (("trainer.total_epoch", "a setting of verl's configuration; did you mean 'total_epochs'?"),),
    ),
    Wrong(
        "three typos",
        (*short("tokn_prob", "topk_fractoin"), "+dataflex.aply=true"),
        (
            ("dataflex.aply", "did you mean 'apply'?"),
            ("dataflex.scorer.name", "did you mean 'token_prob'?"),
            ("dataflex.actuator.name", "did you mean 'topk_fraction'?"),
        ),
    ),
    # ---- types
    Wrong("apply", ("+dataflex=per", "+dataflex.apply=1"), (("dataflex.apply", "got 1; accepted: true or false"),)),
    Wrong("warm-up", ("+dataflex=per", "+dataflex.warmup_step=1.5"), (("dataflex.warmup_step", "an integer >= 0"),)),
    Wrong(
        "number",
        ("+dataflex=difffilter", f"++{BAND}.actuator.params.low=half"),
        ((f"{BAND}.actuator.params.low", "got 'half'; accepted: a number"),),
    ),
    Wrong(
        "flag",
        (*short("token_prob", "topk_fraction"), "+dataflex.actuator.params.largest=no_thanks"),
        (("dataflex.actuator.params.largest", "true or false"),),
    ),
    Wrong("plugins as list", ("+dataflex.plugins=[select]",), (("dataflex.plugins", "a mapping of labels"),)),
    Wrong(
        "plugin as null", ("+dataflex.plugins.select=null",), (("dataflex.plugins.select", "a mapping of settings"),)
    ),
    Wrong(
        "params as number",
        (*short(), "+dataflex.scorer.params=3"),
        (("dataflex.scorer.params", "a mapping of parameter"),),
    ),
    Wrong(
        "three types",
        (
            "+dataflex=[difffilter,per]",
            f"++{BAND}.scorer.params.success_threshold=true",
            f"++{PER}.actuator.params.alpha=big",
            "+dataflex.domains=math",
        ),
        (
            ("dataflex.domains", "a list of domain names"),
            (f"{BAND}.scorer.params.success_threshold", "got True; accepted: a finite number"),
            (f"{PER}.actuator.params.alpha", "got 'big'; accepted: a finite number >= 0"),
        ),
    ),
    # ---- ranges
    Wrong(
        "band upside down",
        (*short(), "+dataflex.actuator.params.low=0.8", "+dataflex.actuator.params.high=0.2"),
        (("dataflex.actuator.params.low", "a number below high, which is 0.2"),),
    ),
    Wrong(
        "fraction",
        ("+dataflex=topk", "++dataflex.plugins.topk.actuator.params.fraction=1.5"),
        (("dataflex.plugins.topk.actuator.params.fraction", "> 0 and <= 1"),),
    ),
    Wrong(
        "temperature",
        ("+dataflex=softmax", "++dataflex.plugins.softmax.actuator.params.temperature=0"),
        (("dataflex.plugins.softmax.actuator.params.temperature", "a finite number > 0"),),
    ),
    Wrong(
        "negative warm-up", ("+dataflex=per", f"+{PER}.warmup_step=-1"), ((f"{PER}.warmup_step", "an integer >= 0"),)
    ),
    Wrong("update step", ("+dataflex=per", "+dataflex.update_step=0"), (("dataflex.update_step", "an integer >= 1"),)),
    Wrong(
        "four ranges",
        (
            "+dataflex=[per,topk]",
            f"++{PER}.actuator.params.alpha=-1",
            f"+{PER}.actuator.params.epsilon=-1",
            "++dataflex.plugins.topk.actuator.params.fraction=0",
            "+dataflex.window=0",
        ),
        (
            ("dataflex.window", "an integer >= 1"),
            (f"{PER}.actuator.params.alpha", "got -1"),
            (f"{PER}.actuator.params.epsilon", "got -1"),
            ("dataflex.plugins.topk.actuator.params.fraction", "got 0"),
        ),
    ),
    # ---- pairs
    Wrong(
        "reweighter under select",
        short(actuator="softmax"),
        (("dataflex.actuator.name", "'softmax' is a reweighter: it belongs to mechanism 'reweight'"),),
    ),
    Wrong(
        "scorer as actuator",
        short(actuator="token_prob"),
        (("dataflex.actuator.name", "'token_prob' is a scorer"),),
    ),
    Wrong(
        "component as plugin",
        ("+dataflex.plugins.softmax.plugin=softmax",),
        (("dataflex.plugins.softmax.plugin", "name it as actuator of mechanism 'reweight'"),),
    ),
    Wrong(
        "mechanism of later",
        short(mechanism="budget"),
        (("dataflex.mechanism", "budget comes with the pre_rollout hook in a later version"),),
    ),
    Wrong(
        "actuator missing",
        ("+dataflex.mechanism=select", "+dataflex.scorer.name=token_prob"),
        (("dataflex.actuator", "got nothing; accepted: the name of a selector"),),
    ),
    Wrong(
        "both forms",
        ("+dataflex=per", *short()),
        (("dataflex", "dataflex.plugins together with dataflex.mechanism, dataflex.scorer, dataflex.actuator"),),
    ),
    Wrong(
        "token weights under geo_mean",
        ("+dataflex=ar", f"{ACTOR}.policy_loss.loss_mode=geo_mean"),
        (("dataflex.plugins.ar.actuator.name", "is not linear in per-token weights"),),
    ),
    Wrong(
        "loss that ignores weights",
        ("+dataflex=per", f"{ACTOR}.policy_loss.loss_mode=bypass_mode"),
        ((f"{ACTOR}.policy_loss.loss_mode", "or try dataflex.apply_to=advantages"),),
    ),
    Wrong(
        "advantages under dro",
        ("+dataflex=per", "+dataflex.apply_to=advantages", f"{ACTOR}.policy_loss.loss_mode=dro"),
        ((f"{ACTOR}.policy_loss.loss_mode", "or try dataflex.apply_to=weights"),),
    ),
    Wrong(
        "three wrong pairs",
        (*short("softmax", "per_advantage"), "+dataflex.normalize=none", f"{ACTOR}.loss_agg_mode=token_mean"),
        (
            ("dataflex.scorer.name", "'softmax' is a reweighter"),
            ("dataflex.actuator.name", "'per_advantage' is a reweighter"),
            ("dataflex.normalize", "nothing here: no configured plugin takes it"),
            (f"{ACTOR}.loss_agg_mode", "did you mean 'token-mean'?"),
        ),
    ),
    # ---- estimator and other settings of verl
    Wrong(
        "estimator without groups",
        ("+dataflex=difffilter", "algorithm.adv_estimator=gae"),
        ((f"{BAND}.scorer.name", "algorithm.adv_estimator=gae does not: use grpo or rloo"),),
    ),
    Wrong(
        "estimator misspelled",
        ("+dataflex=difffilter", "algorithm.adv_estimator=grop"),
        (("algorithm.adv_estimator", "did you mean 'grpo'?"),),
    ),
    Wrong(
        "one rollout a prompt",
        ("+dataflex=difffilter", f"{N}=1"),
        ((f"{BAND}.scorer.name", "set actor_rollout_ref.rollout.n > 1"),),
    ),
    Wrong("mode of verl", ("+dataflex=per", f"{MODE}=sync"), (("dataflex", "nothing would act on it"),)),
    Wrong(
        "mode of later", ("+dataflex=per", f"{MODE}=dataflex_separate_async"), ((MODE, "it comes in a later version"),)
    ),
    Wrong(
        "five at once",
        (
            *short("group_solve_rat"),
            "+dataflex.actuator.params.low=0.9",
            "+dataflex.actuator.params.high=0.2",
            "algorithm.adv_estimator=gae",
            "algorithm.use_pf_ppo=true",
            f"{ACTOR}.policy_loss.loss_mode=vanila",
            "trainer.use_v1=false",
        ),
        (
            ("trainer.use_v1", "true: verl's older trainer"),
            ("dataflex.scorer.name", "did you mean 'group_solve_rate'?"),
            ("dataflex.actuator.params.low", "a number below high"),
            ("algorithm.use_pf_ppo", "got True; accepted: false"),
            (f"{ACTOR}.policy_loss.loss_mode", "did you mean 'vanilla'?"),
        ),
    ),
    # ---- Hydra's rules and presets
    Wrong(
        "plus forgotten",
        ("dataflex.mechanism=select", *short()[1:]),
        (("dataflex.mechanism", "write +dataflex.mechanism=select"),),
    ),
    Wrong(
        "single plus on a value",
        ("+dataflex=difffilter", f"+{BAND}.actuator.params.low=0.3"),
        ((f"{BAND}.actuator.params.low", f"to change it, write ++{BAND}.actuator.params.low=0.3"),),
    ),
    Wrong(
        "preset twice", ("+dataflex=[per,per]",), (("dataflex", "got preset 'per' twice; accepted: each preset once"),)
    ),
    Wrong(
        "label twice",
        (
            "+dataflex.plugins.a.plugin=select",
            "+dataflex.plugins.a.plugin=reweight",
            "+dataflex.plugins.a.scorer=token_prob",
            "+dataflex.plugins.a.actuator=softmax",
        ),
        (("dataflex.plugins.a.plugin", "to change it, write ++dataflex.plugins.a.plugin=reweight"),),
    ),
    Wrong(
        "presets apart",
        ("+dataflex=difffilter", "+dataflex=per"),
        (("dataflex", "stack them in one list: +dataflex=[difffilter,per]"),),
    ),
    Wrong(
        "presets without brackets",
        ("+dataflex=difffilter,per",),
        (("dataflex", "one list of presets; stack them: +dataflex=[difffilter,per]"),),
    ),
    Wrong("preset without plus", ("dataflex=per",), (("dataflex", "write +dataflex=per"),)),
    Wrong(
        "entropy in bypass mode",
        ("+dataflex=high_entropy", "algorithm.rollout_correction.bypass_mode=true"),
        (("algorithm.rollout_correction.bypass_mode", "false with a plugin that reads the entropy of tokens"),),
    ),
    Wrong(
        "a schedule that is wrong at its last knot",
        ("+dataflex=topk", "++dataflex.plugins.topk.actuator.params.fraction={0:1.0,100:1.5}"),
        (("dataflex.plugins.topk.actuator.params.fraction", "got 1.5 at step 100"),),
    ),
    Wrong("preset as null", ("+dataflex=null",), (("dataflex", "a preset or a list of presets, ar, ar_paper"),)),
    Wrong(
        "unreadable override",
        ("+dataflex=per", "+dataflex.apply_to=[weights"),
        (("dataflex.apply_to", "an override key=value that Hydra can read"),),
    ),
    Wrong("group of verl", ("+dataflex=per", "model_engine=dpp"), (("model_engine", "one of dp, megatron"),)),
    Wrong(
        "all of Hydra's at once",
        (
            "+dataflex=[diffilter,per,per]",
            f"+{PER}.actuator.params.alpha=-1",
            "trainer.total_epoch=3",
            "dataflex.mask_scale=keep",
        ),
        (
            ("dataflex", "did you mean 'difffilter'?"),
            (f"{PER}.actuator.params.alpha", "a single + only where there is no value yet; here it is 0.5"),
            ("trainer.total_epoch", "did you mean 'total_epochs'?"),
            ("dataflex.mask_scale", "write +dataflex.mask_scale=keep"),
            ("dataflex", "got preset 'per' twice"),
            ("dataflex.mask_scale", "did you mean 'kept'?"),
            (f"{PER}.actuator.params.alpha", "got -1; accepted: a finite number >= 0"),
        ),
    ),
    Wrong("no such directory", ("+dataflex=per", "--config-dir=nowhere"), (("--config-dir", "got 'nowhere'"),)),
    # ---- YAML
    Wrong(
        "typo in YAML",
        (),
        (
            ("dataflex.plugins.focus.scorer.name", "did you mean 'group_solve_rate'?"),
            ("dataflex.plugins.focus.actuator.params.hihg", "did you mean 'high'?"),
        ),
        yaml="""
            dataflex:
              plugins:
                focus:
                  plugin: select
                  scorer: group_solve_rat
                  actuator: {name: threshold_band, params: {hihg: 0.8}}
        """,
    ),
    Wrong(
        "types in YAML",
        (),
        (
            ("dataflex.warmup_step", "got '3'; accepted: an integer >= 0"),
            ("dataflex.plugins.a/b", "a label of letters, digits, _ and -"),
            ("dataflex.plugins.per", "got 'reweight'; accepted: a mapping of settings"),
        ),
        yaml="""
            dataflex:
              warmup_step: "3"
              plugins:
                a/b: {plugin: select}
                per: reweight
        """,
    ),
    Wrong(
        "interpolation in YAML",
        (),
        (("dataflex.plugins.per.actuator.params.alpha", "a value that can be resolved"),),
        yaml="""
            dataflex:
              plugins:
                per:
                  plugin: reweight
                  scorer: advantage_magnitude
                  actuator: {name: per_advantage, params: {alpha: "${nowhere}"}}
        """,
    ),
    Wrong(
        "label twice in YAML",
        (),
        (("hydra", "found duplicate key"),),
        yaml="""
            dataflex:
              plugins:
                per: {plugin: reweight, scorer: token_prob, actuator: softmax}
                per: {plugin: select, scorer: token_prob, actuator: topk_fraction}
        """,
    ),
    Wrong(
        "YAML and command line",
        (f"+{PER}.normalize=maen", "+dataflex.plugins.second.plugin=reweigth", "algorithm.adv_estimator=gae"),
        (
            ("dataflex.plugins.difffilter.scorer.name", "algorithm.adv_estimator=gae does not"),
            (f"{PER}.normalize", "did you mean 'mean'?"),
            ("dataflex.plugins.second.plugin", "did you mean 'reweight'?"),
            ("dataflex.plugins.second.scorer", "got nothing"),
            ("dataflex.plugins.second.actuator", "got nothing"),
        ),
        yaml="""
            dataflex:
              plugins:
                difffilter: {plugin: select, scorer: group_solve_rate, actuator: threshold_band}
                per: {plugin: reweight, scorer: advantage_magnitude, actuator: per_advantage}
        """,
    ),
)

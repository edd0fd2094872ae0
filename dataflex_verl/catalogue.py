"""The catalogue of errors, ``docs/errors.md``: each message as the code really gives it, its cause and its cure.

``python -m dataflex_verl.catalogue > docs/errors.md`` writes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataflex_verl.catalogue_domains import DOMAIN_ENTRIES, DOMAINS, domain_message
from dataflex_verl.catalogue_new import NEW, NEW_ENTRIES, new_message
from dataflex_verl.catalogue_running import RUNNING, RUNNING_ENTRIES, running_message

MODE = "trainer.v1.trainer_mode=dataflex_sync"
GOOD = (MODE, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
HEAD = """\
# Errors

Written by `python -m dataflex_verl.catalogue` from the code; the messages below are what it prints.

Everything wrong with a configuration comes at once, in the form `setting: got ...; accepted: ...; hint`, with the
setting's full path. `dataflex check <your arguments>` shows it without starting anything; `dataflex train` before Ray
starts; verl's own `python -m verl.trainer.main_ppo` before Ray starts where a preset is used, otherwise before any
worker is created. The exit status is 2.

Each entry shows what was added to `{good}`.
"""


@dataclass(frozen=True)
class Entry:
    """One kind of error.

    Attributes:
        title: what is wrong, in a few words.
        overrides: an example, after GOOD.
        cause, cure: for the reader.
    """

    title: str
    overrides: tuple[str, ...]
    cause: str
    cure: str


def _short(scorer: str, actuator: str, mechanism: str = "select") -> tuple[str, ...]:
    names = {"mechanism": mechanism, "scorer.name": scorer, "actuator.name": actuator}
    return tuple(f"+dataflex.{key}={value}" for key, value in names.items())


BAND = _short("group_solve_rate", "threshold_band")
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
SECTIONS: dict[str, tuple[Entry, ...]] = {
    "The command line": (
        Entry(
            "A single + on a value that is there",
            ("+dataflex=difffilter", "+dataflex.plugins.difffilter.actuator.params.low=0.3"),
            "Hydra adds with `+` and refuses to add what exists; a preset has set this value already.",
            "Write `++`, which sets a value whether or not it is there.",
        ),
        Entry(
            "No + on a key of ours",
            ("dataflex.mechanism=select", *BAND[1:]),
            "verl's own configuration has no `dataflex` block, so Hydra takes the key for a misspelling.",
            "Add keys with `+`.",
        ),
        Entry(
            "A misspelled setting of verl",
            ("+dataflex=per", "trainer.total_epoch=3"),
            "verl's configuration has no such key.",
            "Use the name that it has; `+` adds a key of your own.",
        ),
        Entry(
            "An override that Hydra cannot read",
            ("+dataflex=per", "+dataflex.domains=[math"),
            "Hydra's grammar: brackets, braces, quotes and commas have a meaning.",
            "Close what is open, and put the whole override into quotes for your shell.",
        ),
    ),
    "Presets": (
        Entry(
            "An unknown preset",
            ("+dataflex=diffilter",),
            "No installed package brings a preset of this name.",
            "`dataflex presets` lists them.",
        ),
        Entry(
            "One preset twice",
            ("+dataflex=[per,per]",),
            "Hydra would take it once without a word.",
            "Name it once; to run a method twice, write the second under a label of its own.",
        ),
        Entry(
            "Presets in two overrides",
            ("+dataflex=difffilter", "+dataflex=per"),
            "A Hydra group is chosen once.",
            "Name them in one list.",
        ),
    ),
    "The dataflex block": (
        Entry(
            "An unknown key",
            (*BAND, "+dataflex.warmup_steps=10"),
            "A misspelled key would be ignored, so it is refused.",
            "Use the name in the hint, or one of those listed.",
        ),
        Entry(
            "Both forms at once",
            ("+dataflex=per", *BAND),
            "The short form is one mechanism; the full form, and every preset, is `dataflex.plugins`.",
            "Write all of them under `dataflex.plugins.<label>`.",
        ),
        Entry(
            "A value of the wrong type or range",
            ("+dataflex=topk", "++dataflex.plugins.topk.actuator.params.fraction=50"),
            "The method has no meaning for this value.",
            "Give one that is accepted.",
        ),
        Entry(
            "A decision log of another kind",
            ("+dataflex=per", "+dataflex.log_decisions=token"),
            "The log is off, on, or on with the values of every token.",
            "Write `true` or `tokens`.",
        ),
        Entry(
            "A schedule out of order",
            ("+dataflex=topk", "++dataflex.plugins.topk.actuator.params.fraction={100:0.5,0:1.0}"),
            "A mapping of training steps to numbers is a schedule, and its steps have to rise.",
            "Put the earlier step first.",
        ),
        Entry(
            "A filter that keeps everything",
            ("+dataflex=gfpo", "++dataflex.plugins.gfpo.actuator.params.k=8"),
            "Of the 8 responses to a prompt it keeps 8.",
            "Sample more (`actor_rollout_ref.rollout.n`), or keep fewer.",
        ),
        Entry(
            "A mechanism of a later version",
            _short("reward_difficulty", "static", "curriculum"),
            "This version selects, reweights and mixes.",
            "Wait for it, or use `select`, `reweight` or `mix`.",
        ),
    ),
    "Names and pairs": (
        Entry(
            "An unknown component",
            _short("group_solve_rat", "threshold_band"),
            "No component is registered under this name, and no package declares it.",
            "Use the nearest name; install the package that has it; or name it as `module:Class`.",
        ),
        Entry(
            "An actuator of another mechanism",
            _short("advantage_magnitude", "softmax"),
            "Selectors belong to `select`, reweighters to `reweight`.",
            "Change the mechanism, or choose another actuator.",
        ),
        Entry(
            "A group scorer without groups",
            ("+dataflex=difffilter", "algorithm.adv_estimator=gae"),
            "The scorer compares the rollouts of a prompt, the estimator does not; verl's default is `gae`.",
            "Set `algorithm.adv_estimator=grpo` (or `rloo`, ...) and `actor_rollout_ref.rollout.n` above 1.",
        ),
    ),
    "Proportions": (
        Entry(
            "Two plugins that set proportions",
            ("+dataflex=[reward_gap,tscl]",),
            "Prompts come in one proportion.",
            "Choose one mixer.",
        ),
        Entry(
            "Floors that sum to more than 1",
            ("+dataflex=tscl", "+dataflex.domains=[a,b,c]", "++dataflex.plugins.tscl.actuator.params.floor=0.4"),
            "Three domains cannot have 0.4 each.",
            "Lower the floor to 1 over the number of domains, or less.",
        ),
        Entry(
            "Proportions that are none",
            ("+dataflex=static", "++dataflex.plugins.static.actuator.params.proportions=[-1,2]"),
            "Negative, not a number, all zero, or not one a domain.",
            "Give every domain a number >= 0; their sum does not matter.",
        ),
    ),
    "Settings of verl": (
        Entry(
            "A block under verl's own trainer",
            ("+dataflex=per", "trainer.v1.trainer_mode=sync"),
            "Only our trainer modes call hooks: nothing would act, and the run would look as if it did.",
            f"Add `{MODE}`.",
        ),
        Entry(
            "verl's older trainer",
            ("+dataflex=per", "trainer.use_v1=false"),
            "It has no trainer modes.",
            "Leave `trainer.use_v1` at true.",
        ),
        Entry(
            "A loss that ignores weights",
            ("+dataflex=per", f"{LOSS}=bypass_mode"),
            "This loss never multiplies the weights in: masked responses would train.",
            "Use another loss, or `+dataflex.apply_to=advantages`.",
        ),
        Entry(
            "Token weights under a loss that averages log-probs",
            ("+dataflex=ar", f"{LOSS}=geo_mean"),
            "A weight per token is no factor on that token's term in this loss.",
            "Use a method that decides per response, or another loss.",
        ),
        Entry(
            "Entropies that nobody computes",
            ("+dataflex=high_entropy", "algorithm.rollout_correction.bypass_mode=true"),
            "verl computes the entropy of tokens together with old log-probs, a pass that this mode leaves out.",
            "Leave the mode off, or use a method that needs no entropy.",
        ),
        Entry(
            "A setting that mixes up rows",
            ("+dataflex=per", "algorithm.use_pf_ppo=true"),
            "verl 0.9's v1 trainer pairs resampled rows with other rows' advantages.",
            "Leave it off.",
        ),
    ),
    "Packages": (
        Entry(
            "A package that cannot be imported",
            ("+dataflex.plugins.mine.plugin=not_installed_here:Plugin",),
            "Importing it raised the exception named; its own traceback follows the list of problems.",
            "Install what is missing, or put the directory of your own file on `PYTHONPATH`. `dataflex plugins` shows "
            "which packages load.",
        ),
    ),
}


def messages(entry: Entry) -> list[str]:
    """What ``dataflex check`` says about the entry's example."""
    from dataflex_verl.commands.look import look_at

    return [str(problem) for problem in look_at([*GOOD, *entry.overrides]).findings.problems]


def lines(say: Callable[[Entry], list[str]] = messages) -> Iterator[str]:
    """The catalogue, line by line; ``say`` gives an entry's messages."""
    yield from HEAD.format(good=" ".join(GOOD)).splitlines()
    for section, entries in SECTIONS.items():
        yield from ("", f"## {section}")
        for entry in entries:
            yield from ("", f"### {entry.title}", "", "```text", *(f"$ ... {text}" for text in entry.overrides))
            yield from (*say(entry), "```", "", f"Cause: {entry.cause}", "", f"Cure: {entry.cure}")
    parts = (
        (DOMAINS, DOMAIN_ENTRIES, domain_message),
        (RUNNING, RUNNING_ENTRIES, running_message),
        (NEW, NEW_ENTRIES, new_message),
    )
    for head, described, message in parts:
        yield from ("", *head.splitlines())
        for title, case, cause, cure in described:
            yield from ("", f"### {title}", "", "```text", message(case), "```", "", f"Cause: {cause}", "")
            yield f"Cure: {cure}"


if __name__ == "__main__":
    print("\n".join(lines()))

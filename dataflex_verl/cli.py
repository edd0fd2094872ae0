"""The command ``dataflex``. Heavy modules are imported inside the commands, so that help and errors come at once."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from dataflex_verl.commands.help_texts import (
    CHECK_HELP,
    COMPARE_HELP,
    DEMO_HELP,
    NEW_HELP,
    PLUGINS_HELP,
    REPORT_HELP,
    TRAIN_HELP,
    WHATIF_HELP,
)

app = typer.Typer(
    name="dataflex",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help keeps the line breaks of the examples.
    rich_markup_mode=None,
    help="Data scheduling for reinforcement learning on verl: select, reweight and mix rollouts.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dataflex-verl {metadata.version('dataflex-verl')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(
    help=TRAIN_HELP,
    short_help="Train with verl, the configuration checked first.",
    options_metavar="[--local] [OVERRIDES]...",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(
    ctx: typer.Context,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine's CPU, without a GPU.")] = False,
) -> None:
    from dataflex_verl.commands.train import train as run

    raise typer.Exit(run(list(ctx.args), local=local))


@app.command(help=DEMO_HELP, short_help="Train a tiny model on this CPU and see what a strategy does.")
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Decides tasks, model and sampling noise.")] = 0,
    strategy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A preset (dataflex presets), or none; again to stack. Default: difffilter."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep model, data, metrics and log in this new directory.")
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate of the actor.")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where model and data are kept for the next run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    from dataflex_verl.commands.demo import DemoOptions
    from dataflex_verl.commands.demo import demo as run

    options = DemoOptions(
        steps=steps, seed=seed, strategies=tuple(strategy or ()), out=out, learning_rate=lr, cache=cache
    )
    raise typer.Exit(run(options, as_json=as_json))


@app.command(
    help=COMPARE_HELP,
    short_help="Compare strategies over paired seeds at an equal budget.",
    options_metavar="[OPTIONS] [-- OVERRIDES]...",
)
def compare(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="OVERRIDES", help="Hydra overrides of all arms.", show_default=False)
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]WHAT", help="A preset, presets with +, a file, or none; again.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The arm that others are compared with. Default: none.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, or which: 3, or 0,1,2.")] = "3",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of every run; 40 on the demo task.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The runs and the results; again to resume.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="A task of your own on this machine's CPU.")] = False,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare this metric at the last step instead of validation.")
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate of the demo's actor.")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the demo keeps model and data.")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Run again what was made with other settings.")] = False,
    print_commands: Annotated[
        bool, typer.Option("--print", help="Print a verl command an arm and seed; start nothing.")
    ] = False,
    collect: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Evaluate the runs in a directory; start nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
) -> None:
    from dataflex_verl.commands import compare as command

    if collect is not None:
        raise typer.Exit(command.collect(collect, baseline, metric, as_json=as_json))
    options = command.CompareOptions(
        tuple(arm or ()), baseline, seeds, steps, out, tuple(overrides or ()), local, lr, metric, cache, rerun
    )
    raise typer.Exit(command.compare(options, as_json=as_json, only_print=print_commands))


@app.command(help=REPORT_HELP, short_help="One page over one run or several, from verl's own metrics files.")
def report(
    runs: Annotated[list[str], typer.Argument(metavar="[NAME=]RUN...", help="A run's directory or its metrics file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page. Default: report.html here.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's decision log, if it is not beside the metrics.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures and warnings as JSON instead.")] = False,
) -> None:
    from dataflex_verl.commands.report import report as run

    raise typer.Exit(run(runs, out, as_json=as_json, decisions=decisions))


@app.command(
    help=CHECK_HELP,
    short_help="Check a configuration and show what would run.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def check(
    ctx: typer.Context,
    local: Annotated[bool, typer.Option("--local", help="As for train --local.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: ok, problems, plan.")] = False,
) -> None:
    from dataflex_verl.commands.check import check as run

    raise typer.Exit(run(list(ctx.args), local=local, as_json=as_json))


@app.command(
    help=PLUGINS_HELP,
    short_help="List installed plugins and components.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def plugins(
    ctx: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Built-in components too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from dataflex_verl.commands.plugins import plugins as run

    raise typer.Exit(run(list(ctx.args), every=every, as_json=as_json))


@app.command(help=NEW_HELP, short_help="Write a package of a plugin to begin with.")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the package, such as keep-short.")],
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="plugin, scorer, selector, reweighter or mixer.")
    ] = "plugin",
    preset: Annotated[bool, typer.Option("--preset", help="With a preset of its name.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; NAME if not given.")] = None,
) -> None:
    from dataflex_verl.commands.new import new as run

    raise typer.Exit(run(name, kind=kind, with_preset=preset, out=out))


@app.command(
    help=WHATIF_HELP,
    short_help="See what a strategy would have decided about logged rollouts.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def whatif(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A run's folder, its decision log, verl's dumps.")],
    strategy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A preset, a file, run or none; again, or joined by +, to stack."),
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another, likewise; logged is what the run did.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Checkpoint with the plugins' state before the log's first step.")
    ] = None,
    loss: Annotated[
        str, typer.Option(metavar="token|sequence", help="For verl's dumps: what the loss weighs alike.")
    ] = "token",
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to look at in a browser.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    from dataflex_verl.commands.whatif import WhatIfOptions
    from dataflex_verl.commands.whatif import whatif as run

    options = WhatIfOptions(
        source, tuple(strategy or ()), tuple(against or ()), tuple(ctx.args), state=state, loss=loss, page=page
    )
    raise typer.Exit(run(options, as_json=as_json))


@app.command(help="List presets, ready-made strategies for +dataflex=<name>, a line each.")
def presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    from dataflex_verl.commands.presets import presets as run

    raise typer.Exit(run(as_json=as_json))


def main() -> None:
    """Entry point of the script ``dataflex``."""
    app()


if __name__ == "__main__":
    main()

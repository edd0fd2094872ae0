"""What ``dataflex COMMAND --help`` says, command by command."""

from __future__ import annotations

TRAIN_HELP = """\
Train with verl: verl.trainer.main_ppo, with the configuration checked before Ray starts.

Everything else on the command line goes to verl as Hydra overrides or options, unchanged. Give model, data and reward
as for verl itself.

\b
Examples:
  # A strategy on your usual run: add the trainer mode and the dataflex block.
  dataflex train <your overrides> trainer.v1.trainer_mode=dataflex_sync \\
    +dataflex.mechanism=select +dataflex.scorer.name=group_solve_rate \\
    +dataflex.actuator.name=threshold_band

\b
  # The real trainer on this machine's CPU: a small model, nothing else to set.
  dataflex train --local data.train_files=train.parquet \\
    data.val_files=val.parquet actor_rollout_ref.model.path=./tiny-model \\
    reward.custom_reward_function.path=reward.py

\b
  # Two strategies stacked; everything is decided and logged, nothing changed.
  dataflex train <your overrides> trainer.v1.trainer_mode=dataflex_sync \\
    +dataflex.apply=false \\
    +dataflex.plugins.select.scorer.name=group_solve_rate \\
    +dataflex.plugins.select.actuator.name=threshold_band \\
    +dataflex.plugins.reweight.scorer.name=token_prob \\
    +dataflex.plugins.reweight.actuator.name=advantage_reweight

Exit status: 2 for a configuration that cannot be used, otherwise that of verl.
"""

DEMO_HELP = """\
Train a tiny model on generated tasks, on this machine's CPU, with the real verl trainer.

Makes a warm-started model of 90 thousand parameters and three domains of tasks (sums, middle digits, sorting), trains
it with GRPO under a strategy and shows reward and validation before and after, what the strategy did, and the verl
command that does the same run.

\b
Examples:
  dataflex demo
  dataflex demo --strategy none
  dataflex demo --strategy difffilter --strategy per --out ./demo-run
"""

COMPARE_HELP = """\
Train under several strategies and say which of them helped: the same seeds, the same number of generated rollouts.

An arm is a preset, presets joined by +, a file with one Hydra override a line, or none; NAME= in front names it. Every
arm runs once under each seed, in a folder of its own; what is finished is not run again. The task is that of the demo,
on this CPU. Overrides behind -- change it for all arms; with data.train_files among them they are a task of your own.

\b
Examples:
  dataflex compare --arm none --arm difffilter --seeds 3 --steps 20 --out ./cmp
  dataflex compare --arm none --arm both=difffilter+per --arm ./mine.txt --out ./cmp
  dataflex compare --arm none --arm per --steps 200 --out ./cmp -- <your overrides>

\b
On a cluster: print a verl command an arm and seed, run them, gather what they logged.
  dataflex compare --arm none --arm per --steps 200 --out ./cmp --print -- <your overrides>
  dataflex compare --collect ./cmp

Writes results.json, results.md and report.html. Exit status: 0, 1 when a run failed, 2 when something is refused.
"""

REPORT_HELP = """\
One page over one run or several: reward, validation, what was kept and why not, weights, domains, time, warnings.

Reads verl's own JSONL file (trainer.logger=[console,file]) and the plan beside it; a run without DataFlex shows what
verl logs. The page is one file, readable without a network and on a phone.

\b
Examples:
  dataflex report ./run
  dataflex report plain=./a/metrics.jsonl filtered=./b/metrics.jsonl -o both.html
  dataflex report ./run --json
"""

CHECK_HELP = """\
Check a configuration without starting anything: print what would run, or everything that is wrong.

Takes what verl.trainer.main_ppo takes. The lines are those that the run itself prints. Options of this command:
--local, --json, --help.

Examples:

\b
  dataflex check trainer.v1.trainer_mode=dataflex_sync algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.n=8 '+dataflex=[difffilter,per]'

Exit status: 2 for a configuration that cannot be used, otherwise 0.
"""

PLUGINS_HELP = """\
List installed plugins and components: kind, package and version, hooks, whether they load, and which of them are
active under the given overrides. Installing a package makes nothing active: only what a configuration names runs.
"""

NEW_HELP = """\
Write a package of a plugin to begin with: module, tests, README and what pip needs. It installs, passes its tests and
runs as it is. Nothing outside its directory is touched.

\b
Examples:
  dataflex new keep-short && pip install ./keep-short && python -m pytest keep-short
  dataflex new dataflex-novelty --kind scorer --preset
"""

WHATIF_HELP = """\
What would a strategy have decided about rollouts that were logged? No trainer, no GPU.

SOURCE is a run's folder or the decision log in it (a run with +dataflex.log_decisions=true writes one), or the
rollouts that verl dumps (trainer.rollout_data_dir). Without --strategy it is the run's own; without --against it is
compared with what the run did. After SOURCE, Hydra overrides change the strategy.

\b
Examples:
  dataflex whatif checkpoints/project/run --strategy difffilter
  dataflex whatif checkpoints/project/run --strategy difffilter --strategy per --against topk
  dataflex whatif checkpoints/project/run --strategy difffilter \\
    ++dataflex.plugins.difffilter.actuator.params.low=0.1
  dataflex whatif rollouts/ --strategy my-strategy.yaml --against difffilter --page whatif.html

Exit status: 2 for a log that cannot be read, a wrong strategy, or one that reads what the log does not have.
"""

"""Whole trainings, one after another in this process and its Ray session.

As verl's task runner does it, without the task runner's process: build the trainer, its agent loop, and ``fit``. What a
run started is ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group


@dataclass(frozen=True)
class Run:
    """What a training left behind.

    Attributes:
        trainer: the trainer; its Ray workers are gone.
        metrics: what verl's own file logger wrote, a dict a step.
        seen: what ``look`` returned, called after initialisation and after the last step.
    """

    trainer: Any
    metrics: list[dict[str, float]]
    seen: list[Any]


def train(config: DictConfig, look: Callable[[Any], Any] | None = None) -> Run:
    """Train as ``config`` says.

    verl gives its reward workers fixed names, so those of an earlier trainer in this session are ended first.

    Args:
        config: a composed configuration.
        look: given the trainer, with live workers and a rollout that has its weights.
    """
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls

    _end_reward_workers()
    before = _placement_groups()
    seen: list[Any] = []
    trainer = manager = None
    with _file_logger(config) as log:
        try:
            trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            if look is not None:
                seen.append(look(trainer))
            trainer.fit(manager)
            if look is not None:
                seen.append(look(trainer))
        finally:
            _end(trainer, manager, before)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return Run(trainer, [line["data"] for line in lines], seen)


def ask(trainer: Any, prompt: list[int], **params: Any) -> Any:
    """The rollout server's answer to one request."""
    server = trainer.llm_server_manager.server_handles[0]
    return ray.get(server.generate.remote(prompt_ids=prompt, sampling_params=params, request_id="test"))


@contextlib.contextmanager
def _file_logger(config: DictConfig) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        os.environ["VERL_FILE_LOGGER_PATH"] = str(path)
        with open_dict(config):
            config.trainer.logger = ["file"]
        try:
            yield path
        finally:
            del os.environ["VERL_FILE_LOGGER_PATH"]


def _placement_groups() -> set[str]:
    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


def _end_reward_workers() -> None:
    for number in range(8):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(f"reward_loop_worker_{number}"))


def _end(trainer: Any, manager: Any, before: set[str]) -> None:
    """Kill the actors of a run, remove its placement groups and clear its rows."""
    servers = getattr(trainer, "llm_server_manager", None)
    actors = list(getattr(manager, "agent_loop_workers", []))
    if servers is not None:
        actors += [*servers.server_handles, servers.global_load_balancer]
    for actor in actors:
        ray.kill(actor)
    _end_reward_workers()
    for name in _placement_groups() - before:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name))))
    for partition, rows in tq.kv_list().items():
        if rows:
            tq.kv_clear(keys=list(rows), partition_id=partition)

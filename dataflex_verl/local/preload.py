"""What the fork server imports before it forks workers, and when."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

# Heavy and free of Ray, whose library reads its settings and the job's id from the environment when it is loaded. A
# driver's server starts before Ray gives them; they come with the first worker.
EARLY_PRELOAD = (
    "torch",
    "transformers.generation",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tensordict",
    "datasets",
    "torchdata.stateful_dataloader",
    "peft",
    "dataflex_hooks",
)
RAY_PRELOAD = (
    "ray.actor",
    "verl",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp",
    "dataflex_verl.local.rollout",
)


class Job:
    """The Ray job that a server forks for, known from its first worker: one server, one job.

    Args:
        modules: imported for the first worker, under Ray's variables of that worker.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.job_id: str | None = None
        self.known = False

    def admits(self, environment: Mapping[str, str]) -> bool:
        """Whether a worker of this environment may be forked. The first one always may, and decides."""
        job_id = environment.get("RAY_JOB_ID")
        if not self.known:
            self.known, self.job_id = True, job_id
            os.environ.update({name: value for name, value in environment.items() if name.startswith("RAY_")})
            preload(self.modules)
        return job_id == self.job_id


def preload(names: Sequence[str]) -> None:
    """Import modules that workers need. One that fails is left to the workers that need it."""
    # A pool of OpenMP threads does not survive a fork; children set their own number.
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in names:
        try:
            importlib.import_module(name)
            _leave_ray_unseeded()
        except Exception:
            traceback.print_exc()
    if threads is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = threads
    # Shared pages stay shared: the collector would otherwise write to every object's header in every child.
    gc.collect()
    gc.freeze()


class _FreshIds:
    """Stands where Ray draws the id of an actor class, when a class is decorated with ``ray.remote``.

    Ray's own generator seeds itself at first use. Were that in this process, all workers would draw the same ids.
    """

    def __init__(self, id_type: Any) -> None:
        self.id_type = id_type

    def from_random(self) -> Any:
        return self.id_type(os.urandom(self.id_type.size()))


def _leave_ray_unseeded() -> None:
    actor = sys.modules.get("ray.actor")
    if actor is not None and not isinstance(actor.ActorClassID, _FreshIds):
        actor.ActorClassID = _FreshIds(actor.ActorClassID)

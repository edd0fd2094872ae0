"""verl's two rollout interfaces over the transformers server: the replica (trainer side) and the weight adapter."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from dataflex_verl.local.server import RolloutServer, ServerSettings

# One server for all data-parallel ranks: the machine's cores are shared anyway, one more process would start slower,
# and which rank a request comes from then cannot change its noise. Named actors are private to a Ray job.
SERVER_NAME = "dataflex_local_rollout"


class TransformersReplica(RolloutReplica):
    """A rollout replica for a CPU. All replicas of a job answer through the same server actor."""

    async def launch_servers(self) -> None:
        if self.is_reward_model or self.is_teacher_model or self.world_size != 1:
            raise ValueError(
                "The local rollout serves the policy with one process per replica: set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1 and use no rollout-served reward or teacher "
                "model."
            )
        server = (
            ray.remote(RolloutServer)
            .options(name=SERVER_NAME, get_if_exists=True, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(self._settings())
        )
        await server.set_global_steps.remote(None)
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"{SERVER_NAME}:{self.replica_rank}"

    def _settings(self) -> ServerSettings:
        model, rollout = self.model_config, self.config
        override = OmegaConf.to_container(model.get("override_config") or OmegaConf.create({}), resolve=True)
        return ServerSettings(
            model_path=os.path.expanduser(model.path),
            tokenizer_path=os.path.expanduser(model.get("tokenizer_path") or model.path),
            dtype=rollout.dtype,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_num_seqs=rollout.max_num_seqs,
            ignore_eos=rollout.ignore_eos,
            seed=rollout.seed,
            threads=int(os.environ.get("DATAFLEX_LOCAL_THREADS", "1")),
            trust_remote_code=bool(model.get("trust_remote_code", False)),
            override_config={str(key): value for key, value in dict(override or {}).items()},
        )


class TransformersAdapter(BaseRollout):
    """Lives in each actor worker and hands its weights to the server.

    Every rank walks through the generator, because gathering a sharded tensor is collective; rank 0 sends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sends = int(os.environ["RANK"]) == 0
        self._server: Any = None

    @property
    def server(self) -> Any:
        # Looked up late: the server starts after the workers.
        if self._server is None:
            self._server = ray.get_actor(SERVER_NAME)
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self._sends:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self._sends:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Send full named tensors.

        Raises:
            ValueError: for any other wire format.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"The local rollout takes wire_format='named_tensors'; got {wire_format!r}.")
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        if self._sends:
            await self.server.load_weights.remote(tensors, global_steps)

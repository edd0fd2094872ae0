"""verl's two rollout interfaces over the transformers server: the replica (trainer side) and the weight adapter."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.single_controller.ray.base import RayWorkerGroup
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from dataflex_verl.local.engine import ServerSettings
from dataflex_verl.local.server import RolloutServer


def server_name(worker: str) -> str:
    """The name of the server that gets its weights from the worker with this actor id, and from no other."""
    return f"dataflex_local_rollout_{worker}"


def refuse_unmerged_lora(model: Any) -> None:
    """LoRA adapters reach the rollout only merged into the weights.

    Raises:
        ValueError: says which setting merges them.
    """
    uses_lora = int(model.get("lora_rank") or 0) > 0 or model.get("lora_adapter_path") is not None
    if uses_lora and not (model.get("lora") or {}).get("merge", False):
        raise ValueError(
            "The local rollout takes whole weights, and verl would send it LoRA adapters: "
            "set actor_rollout_ref.model.lora.merge=True."
        )


class TransformersReplica(RolloutReplica):
    """A rollout replica for a CPU.

    All replicas of one worker group answer through the same server: the machine's cores are shared anyway, one more
    process would start slower, and which replica a request comes to then cannot change its noise.
    """

    _first_worker: Any = None

    async def init_hybrid(self, worker_group: RayWorkerGroup) -> None:
        self._first_worker = worker_group.workers[0]
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        """Start the server, or find it where another replica has.

        Raises:
            ValueError: settings that this rollout cannot serve.
        """
        if self.is_reward_model or self.is_teacher_model or self.world_size != 1:
            raise ValueError(
                "The local rollout serves the policy with one process per replica: set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1 and use no rollout-served reward or teacher "
                "model."
            )
        refuse_unmerged_lora(self.model_config)
        sender = self._first_worker or self.workers[0]
        server = (
            ray.remote(RolloutServer)
            .options(
                name=server_name(sender._actor_id.hex()),
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(self._settings())
        )
        await server.set_global_steps.remote(None)
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"dataflex_local_rollout:{self.replica_rank}"

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
            max_model_len=rollout.max_model_len,
            frees_cache=rollout.free_cache_engine,
            ignore_eos=rollout.ignore_eos,
            seed=rollout.seed,
            threads=int(os.environ.get("OMP_NUM_THREADS") or 1),
            trust_remote_code=bool(model.get("trust_remote_code", False)),
            override_config={str(key): value for key, value in dict(override or {}).items()},
        )


class TransformersAdapter(BaseRollout):
    """Lives in each actor worker and hands its weights to the server.

    Every rank walks through the generator, because gathering a sharded tensor is collective; rank 0 sends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unmerged_lora(self.model_config)
        self._sends = int(os.environ["RANK"]) == 0
        self._server: Any = None

    @property
    def server(self) -> Any:
        # Looked up late: the server starts after the workers.
        if self._server is None:
            self._server = ray.get_actor(server_name(ray.get_runtime_context().get_actor_id()))
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

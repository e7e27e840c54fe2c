"""Several devices for one model: copies by DDP or parts by FSDP2, and the processes that take part.

Reference: FSDP2 of torch; Zhao et al. 2023 (arXiv 2304.11277).
Shapes: E experts, D model width.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.parametrize import is_parametrized

from simbal.distributed import full_tensor
from simbal.errors import UserError
from simbal.model.moe import MoELayer
from simbal.model.router import Router
from simbal.model.transformer import Transformer
from simbal.training.checkpoint import part_of, publish, write_file

TIMEOUT = timedelta(minutes=30)  # for which a rank waits for another, for example while rank zero saves


def cluster_environment() -> ClusterEnvironment:
    """Return the environment of torchrun or srun if one of them started this process, else Lightning's own.

    Lightning would take every job in a Slurm allocation for a rank of srun.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PTY_PORT" not in os.environ:
        try:
            return SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:  # it asks for --ntasks-per-node
            raise UserError(str(error)) from None
    return LightningEnvironment()


def started_by_launcher(devices: int) -> bool:
    """Return whether torchrun or srun started this process as a rank; `UserError` if it started another number."""
    environment = cluster_environment()
    if isinstance(environment, LightningEnvironment):
        return False
    launcher = "torchrun" if isinstance(environment, TorchElasticEnvironment) else "srun"
    if environment.world_size() != devices:
        raise UserError(
            f"{launcher} started {environment.world_size()} processes, but trainer.devices={devices}: make them equal"
        )
    return True


def devices_per_node(devices: int) -> int:
    """Return how many of a run's devices one machine has: all, unless a launcher started ranks on several machines."""
    environment = cluster_environment()
    if isinstance(environment, TorchElasticEnvironment):
        return int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    return devices // int(os.environ["SLURM_NNODES"]) if isinstance(environment, SLURMEnvironment) else devices


def trainer_arguments(devices: int, strategy: str, config_hash: str) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for one device, a copy on each of several (ddp) or a part (fsdp)."""
    if devices == 1:
        return {"devices": 1}
    local = devices_per_node(devices)
    if strategy == "fsdp":
        sharing: ParallelStrategy = AtomicFSDP(devices, config_hash)
    else:
        # strategies keep their buffers equal; without find_unused_parameters DDP rebuilds its buckets after the first
        # step, and a resumed run would add gradients in another order
        sharing = DDPStrategy(broadcast_buffers=False, find_unused_parameters=True)
    return {"devices": local, "num_nodes": devices // local, "strategy": sharing}


def join_ranks(strategy: Strategy) -> None:
    """Start the other ranks, unless torchrun or srun did, and connect them; nothing for one device.

    Lightning does this at the start of `fit`. The ranks need it before, to agree on the folder and the checkpoint.
    """
    if not isinstance(strategy, ParallelStrategy):
        return
    environment = strategy.cluster_environment
    assert environment is not None
    if launcher := strategy.launcher:
        launcher.launch(lambda: None)
    strategy.set_world_ranks()  # type: ignore[attr-defined]
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    if isinstance(environment, LightningEnvironment):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a host may not resolve
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=strategy.global_rank, world_size=strategy.world_size, timeout=TIMEOUT)


class AtomicFSDP(ModelParallelStrategy):
    """FSDP2 whose checkpoint folder gets its name once every rank has written its part.

    Lightning writes into the final folder, so that a kill leaves half a checkpoint under a valid name.
    """

    def __init__(self, devices: int, config_hash: str) -> None:
        """Set the number of devices, and the hash of the run's config, which every checkpoint holds."""
        super().__init__(devices, 1)
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder to resume from, or, for weights alone, one file that every program can read safely."""
        target, checkpoint = Path(filepath), checkpoint | {"config_hash": self.config_hash}
        if "optimizer_states" not in checkpoint:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: full_tensor(weight).cpu() for name, weight in weights.items()}
            if self.is_global_zero:
                write_file(checkpoint, target)
            self.barrier()
            return
        part = part_of(target)
        if self.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, part)
        except CheckpointException as failed:  # a BaseException, which holds the error of each rank
            if self.is_global_zero:
                shutil.rmtree(part, ignore_errors=True)  # a full disk needs the room
            raise failed.failures[min(failed.failures)][0] from failed
        self.barrier()
        if self.is_global_zero:
            publish(part, target)
        self.barrier()


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Leave a part of every parameter, gradient and moment on each of the mesh's devices; only once per model.

    A layer's feed-forward, most of a model, is gathered for its forward pass and again for its backward pass; the rest
    stays gathered from a forward pass to its backward pass, as losses read routers and the head.
    """
    if isinstance(model, FSDPModule):
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # a validation leaves it gathered
        return
    for layer in model.feed_forwards:
        if isinstance(layer, MoELayer):
            fully_shard(layer.router, mesh=mesh, reshard_after_forward=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextmanager
def whole_routers(model: Transformer) -> Iterator[list[Tensor]]:
    """Yield each router's weight (E, D) after an optimizer step, whole on every rank; changes to it stay."""
    weights = [
        _whole_weight(router) if isinstance(router, FSDPModule) else router.weight_ED for router in model.routers
    ]
    yield weights
    for router, weight_ED in zip(model.routers, weights, strict=True):
        if weight_ED.is_leaf and isinstance(part := router.weight_ED, DTensor):
            with torch.no_grad():
                part.copy_(distribute_tensor(weight_ED, part.device_mesh, part.placements, src_data_rank=None))


def _whole_weight(router: Router) -> Tensor:
    """Return a router's whole weight; a parametrised one is computed again, and is no leaf then."""
    if is_parametrized(router):
        computed: Any = router.get_submodule("parametrizations.weight_ED")
        weight_ED: Tensor = computed[0](full_tensor(computed.original))
        return weight_ED
    return nn.Parameter(full_tensor(router.weight_ED.detach()).clone())

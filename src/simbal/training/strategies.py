"""Several devices for one model: a replica on each (DDP) or a shard on each (FSDP2), and the setup of the ranks.

Reference: PyTorch FSDP2; Zhao et al. 2023 (arXiv 2304.11277).
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
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from simbal.distributed import copy_full, full_tensor
from simbal.errors import UserError
from simbal.model.moe import MoELayer
from simbal.model.transformer import Transformer
from simbal.runs.atomic import PARTIAL_SUFFIX
from simbal.training.checkpoint import publish_folder, write_file

TIMEOUT = timedelta(minutes=30)  # how long a rank waits for another, for example while rank zero saves


def cluster_environment() -> ClusterEnvironment:
    """Return the environment of torchrun or srun if one of them started this process, else Lightning's own.

    Lightning by itself would treat every process in a Slurm allocation as a rank started by srun.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PTY_PORT" not in os.environ:
        try:
            return SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:  # --ntasks-per-node is missing
            raise UserError(str(error)) from None
    return LightningEnvironment()


def is_external_rank(devices: int) -> bool:
    """Whether torchrun or srun started this process as one of the run's ranks.

    Raises:
        UserError: the number of processes differs from `devices`.
    """
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
    """Return how many of a run's devices are on one machine: all, unless torchrun or srun started several nodes."""
    environment = cluster_environment()
    if isinstance(environment, TorchElasticEnvironment):
        return int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    return devices // int(os.environ["SLURM_NNODES"]) if isinstance(environment, SLURMEnvironment) else devices


def trainer_arguments(devices: int, strategy: str, config_hash: str) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that depend on the number of devices and the strategy."""
    if devices == 1:
        return {"devices": 1}
    local = devices_per_node(devices)
    parallel: ParallelStrategy
    if strategy == "fsdp":
        parallel = AtomicFSDP(devices, config_hash)
    else:
        # broadcast_buffers: balancing strategies keep their buffers equal on all ranks. find_unused_parameters: without
        # it DDP rebuilds its buckets after the first step, and a resumed run would sum gradients in another order.
        parallel = DDPStrategy(broadcast_buffers=False, find_unused_parameters=True)
    return {"devices": local, "num_nodes": devices // local, "strategy": parallel}


def join_ranks(strategy: Strategy) -> None:
    """Launch the other ranks, unless torchrun or srun did, and connect to them. With one device, do nothing.

    Lightning does this in `fit`, but the ranks must agree on the folder and the checkpoint before that.
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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=strategy.global_rank, world_size=strategy.world_size, timeout=TIMEOUT)


class AtomicFSDP(ModelParallelStrategy):
    """FSDP2 with atomic checkpoints: a folder gets its final name once every rank has written its shard.

    Lightning writes into the final folder, so a killed run would leave a partial checkpoint under a valid name.
    """

    def __init__(self, devices: int, config_hash: str) -> None:
        super().__init__(devices, 1)
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder to resume from, or a single file if the checkpoint holds only weights."""
        target, checkpoint = Path(filepath), checkpoint | {"config_hash": self.config_hash}
        if "optimizer_states" not in checkpoint:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: full_tensor(weight).cpu() for name, weight in weights.items()}
            if self.is_global_zero:
                write_file(checkpoint, target)
            self.barrier()
            return
        part = target.with_name(f".{target.name}{PARTIAL_SUFFIX}")
        if self.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, part)
        except CheckpointException as error:  # a BaseException that holds the error of each rank
            if self.is_global_zero:
                shutil.rmtree(part, ignore_errors=True)  # frees space on a full disk
            raise error.failures[min(error.failures)][0] from error
        self.barrier()
        if self.is_global_zero:
            publish_folder(part, target)
        self.barrier()


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard every parameter, gradient and moment over the devices of the mesh, unless this is already done.

    Feed-forward layers, which hold most parameters, are gathered for the forward pass and again for the backward pass.
    Everything else stays gathered in between, because losses use the routers and the head.
    """
    if isinstance(model, FSDPModule):
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # parameters stay gathered after a validation
        return
    for layer in model.feed_forwards:
        if isinstance(layer, MoELayer):
            fully_shard(layer.router, mesh=mesh, reshard_after_forward=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextmanager
def full_router_weights(model: Transformer) -> Iterator[list[Tensor]]:
    """Yield each router's full weight (E, D) after an optimizer step; in-place changes are written back to the shards.

    The weight of a parametrized router is recomputed, so changes to it are lost.
    """
    weights: list[Tensor] = []
    for router in model.routers:
        if not isinstance(router, FSDPModule):
            weights.append(router.weight_ED)
        elif is_parametrized(router):
            parametrization: Any = router.get_submodule("parametrizations.weight_ED")
            weights.append(parametrization[0](full_tensor(parametrization.original)))
        else:
            weights.append(nn.Parameter(full_tensor(router.weight_ED.detach()).clone()))
    yield weights
    for router, weight_ED in zip(model.routers, weights, strict=True):
        if weight_ED.is_leaf and isinstance(part := router.weight_ED, DTensor):
            copy_full(part, weight_ED)

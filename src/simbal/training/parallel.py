"""Shares a model among several devices: each holds all of it (ddp), or a part (fsdp).

Reference: FSDP2 of torch; Zhao et al. 2023 (arXiv 2304.11277).
Shapes: E experts, D model width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.parametrize import is_parametrized

from simbal.distributed import whole, world_size
from simbal.model.moe import MoELayer
from simbal.model.router import Router
from simbal.model.transformer import Transformer
from simbal.training.ranks import launched, local_devices
from simbal.training.shards import Sharded


class Joined(LightningEnvironment):
    """A cluster environment that tells Lightning that all processes run already.

    Left to itself, Lightning would take a Slurm job's tasks for the ranks, and refuse to train in a job of several.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True, as nothing is left to start."""
        return True

    def world_size(self) -> int:
        """Return the number of ranks, which Lightning would work out from even nodes."""
        return world_size()

    def global_rank(self) -> int:
        """Return this process's rank, which Lightning would work out from nodes filled one after another."""
        return dist.get_rank() if dist.is_initialized() else 0

    def local_rank(self) -> int:
        """Return the index of this process's device on its machine."""
        here = launched()
        return here.local_rank if here else self.global_rank()

    def teardown(self) -> None:
        """Do nothing, as Lightning's own method would change the environment."""


class DeviceCount(Callback):
    """A callback that lets a run go on with another number of devices, and keeps on how many each step was made.

    So too its precision, as `auto` may mean another one on another machine.
    """

    def __init__(self) -> None:
        # by the number of steps that were done before
        self.devices: dict[int, int] = {}
        self.precisions: dict[int, str] = {}

    @property
    def warnings(self) -> list[str]:
        """The sentences of a run that has changed them, as that changes the rounding."""
        found = []
        for what, since in (("devices", self.devices), ("precision", self.precisions)):
            spans = ", ".join(f"{value} from step {step}" for step, value in since.items())
            found += [f"{what} changed, and with that the rounding: {spans}"] if len(since) > 1 else []
        return found

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the number of devices and the precision if they are others."""
        _note(self.devices, trainer.global_step, world_size())
        _note(self.precisions, trainer.global_step, str(trainer.precision))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"since": self.devices, "precisions": self.precisions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was saved."""
        self.devices, self.precisions = {**state_dict["since"]}, {**state_dict["precisions"]}

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Count the micro-batches that are done as if there had always been this many devices.

        Lightning finds the last micro-batch of a step by that number.
        """
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            more = checkpoint["global_step"] * trainer.accumulate_grad_batches - counts["ready"]
            counts |= {name: count + more for name, count in counts.items()}


def _note(since: dict[int, Any], step: int, value: Any) -> None:
    if not since or [*since.values()][-1] != value:
        since[step] = value


def on_devices(devices: int, strategy: str, config_hash: str) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for `devices` and `strategy`.

    They stand for one device, for a copy of the model on each of several, or for a part of it on each, which puts the
    run's `config_hash` into its checkpoints.
    """
    if devices == 1:
        return {"devices": 1}
    local = local_devices(devices)
    if strategy == "fsdp":
        sharing: Any = Sharded(devices, config_hash)
    else:
        # strategies keep their buffers equal; buckets of gradients that are made anew after the first step would sum in
        # another order after a restart, and they are not where unused parameters are looked for
        sharing = DDPStrategy(broadcast_buffers=False, find_unused_parameters=True)
    return {"devices": local, "num_nodes": devices // local, "strategy": sharing}


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Leave a part of every parameter, gradient and moment on each of the mesh's devices; nothing more if that is done.

    A layer's feed-forward, most of a model, is put together for its forward pass and again for its backward pass; the
    rest, routers among it, from a forward pass to its backward pass, as losses read routers and the head.
    """
    if isinstance(model, FSDPModule):
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # a validation has left it whole
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
        weight_ED: Tensor = computed[0](whole(computed.original))
        return weight_ED
    return nn.Parameter(whole(router.weight_ED.detach()).clone())

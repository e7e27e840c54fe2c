"""Shares a model among several devices: each holds all of it (ddp), or a part (fsdp).

Reference: FSDP2 of torch; Zhao et al. 2023 (arXiv 2304.11277).
Shapes: E experts, D model width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.parametrize import is_parametrized

from simbal.distributed import whole
from simbal.model.moe import MoELayer
from simbal.model.router import Router
from simbal.model.transformer import Transformer
from simbal.training.ranks import local_devices


class Joined(LightningEnvironment):
    """A cluster environment that tells Lightning that all processes run already, `local_size` of them here."""

    def __init__(self, local_size: int) -> None:
        super().__init__()
        self.local_size = local_size

    @property
    def creates_processes_externally(self) -> bool:
        """True, as nothing is left to start."""
        return True

    def local_rank(self) -> int:
        """Return the index of this process's device on its machine."""
        return dist.get_rank() % self.local_size

    def node_rank(self) -> int:
        """Return the index of this machine."""
        return dist.get_rank() // self.local_size

    def teardown(self) -> None:
        """Do nothing, as Lightning's own method would change the environment."""


def on_devices(devices: int, strategy: str) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for `devices` and `strategy`.

    They stand for one device, for a copy of the model on each of several, or for a part of it on each.
    """
    if devices == 1:
        return {"devices": 1}
    local = local_devices(devices)
    joined = Joined(local)
    if strategy == "fsdp":
        sharing: Any = ModelParallelStrategy(devices, 1, save_distributed_checkpoint=False)
        sharing.cluster_environment = joined
    else:
        # strategies keep their buffers equal; buckets of gradients that are made anew after the first step would sum in
        # another order after a restart, and they are not where unused parameters are looked for
        sharing = DDPStrategy(cluster_environment=joined, broadcast_buffers=False, find_unused_parameters=True)
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

"""What a training step holds on each of several devices, which have all of the model (ddp) or a part of it (fsdp).

Shapes: V vocabulary, D model width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from simbal.model.memory_cost import MemoryCost, Step, memory_cost
from simbal.model.transformer import Transformer, TransformerShape

MemoryOf = Callable[[int], "DeviceMemory"]  # by micro-batch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device."""

    step: MemoryCost
    sharing: int  # what it takes to train together

    @property
    def peak(self) -> int:
        """The most at once."""
        return self.step.peak + self.sharing


def strategies(gpus: int) -> tuple[str, ...]:
    """How the devices can share the work; one has nothing to share."""
    return ("ddp", "fsdp") if gpus > 1 else ("one device",)


def device_memory(strategy: str, shape: TransformerShape, step: Step, gpus: int) -> DeviceMemory:
    """Memory of one of `gpus` devices.

    ddp: gradients are summed in buckets as large as all of them together (torch's DistributedDataParallel, unless
    gradient_as_bucket_view). fsdp, as simbal.training.parallel cuts the model: each device holds its rows of every
    parameter, gradient and moment; beside them whole weights and gradients of all but the feed-forwards, and of two
    feed-forwards, the one in use and the next.

    Two processes on a CPU (tiny, small; November 2026) took 0.98 to 1.01 of it with ddp, 0.89 to 0.93 with fsdp.
    """
    alone = memory_cost(shape, step)
    if strategy == "ddp":
        return DeviceMemory(alone, alone.gradients)
    if strategy != "fsdp":
        return DeviceMemory(alone, 0)
    with torch.device("meta"):
        model = Transformer(shape, step.backend if shape.num_experts else None)
    part = step.stored * sum(math.ceil(len(p) / gpus) * (p.numel() // len(p)) for p in model.parameters())
    feed_forwards = [sum(p.numel() for p in layer.parameters()) for layer in model.feed_forwards]
    together = sum(p.numel() for p in model.parameters()) - sum(feed_forwards) + sum(feed_forwards[:2])
    cut = replace(alone, weights=part, gradients=part, moments=2 * part)
    return DeviceMemory(cut, 2 * step.stored * together)


def largest_micro_batch(memory_of: MemoryOf, sequences: int, limit: float) -> int | None:
    """The largest divisor of a device's `sequences` whose step needs at most `limit` bytes; None if none does."""
    sizes = (size for size in range(sequences, 0, -1) if sequences % size == 0)
    return next((size for size in sizes if memory_of(size).peak <= limit), None)

"""Failures that training cannot go on from: memory that runs out, and a loss or gradient that is not finite.

Shapes: L MoE layers, E experts.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simbal.distributed import whole
from simbal.errors import UserError
from simbal.metrics.routing import max_vio
from simbal.model.moe import MoELayer
from simbal.model.transformer import Transformer

# how torch reports it on a CPU, and some CUDA libraries: as a plain RuntimeError
MESSAGE = re.compile(r"DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED|std::bad_alloc")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise `UserError` where memory runs out within the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not MESSAGE.search(str(error)):
            raise
        raise UserError("out of memory: use a smaller trainer.micro_batch, data.seq_len or model") from error


class DivergedError(Exception):
    """An end of training, which cannot go on as a loss or gradient is not finite."""

    def __init__(self, what: str, step: int, layers: list[dict[str, float | None]]) -> None:
        """Keep the step and the statistics of each MoE layer; None for a number that is not finite."""
        super().__init__(f"diverged: {what} is not finite in step {step}; a smaller optim.lr may help")
        self.step, self.layers = step, layers


def layer_statistics(model: Transformer, counts_LE: Tensor | None) -> list[dict[str, float | None]]:
    """Return, for each MoE layer, the norms of weights and gradients, the number of nonfinite gradients, and the load.

    Args:
        model: after a backward pass, before clipping.
        counts_LE: tokens per expert in the step, (layers, experts); None if no micro-batch was finished.
    """
    found: list[dict[str, float | None]] = []
    moe_layers = [layer for layer in model.feed_forwards if isinstance(layer, MoELayer)]
    for layer, moe in enumerate(moe_layers):
        weights = {"router": list(moe.router.parameters()), "experts": [moe.w13_E2FD, moe.w2_EFD, *(moe.biases or ())]}
        if moe.shared is not None:
            weights["shared"] = list(moe.shared.parameters())
        statistics: dict[str, float | None] = {}
        for name, parameters in weights.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            statistics |= {
                f"{name}/weight_norm": _norm(parameters),
                f"{name}/gradient_norm": _norm(gradients),
                f"{name}/nonfinite_gradients": sum(int(whole((~gradient.isfinite()).sum())) for gradient in gradients),
            }
        if counts_LE is not None:
            statistics["train/max_vio"] = max_vio(counts_LE[layer]).item()
        found.append(statistics)
    return found


def _norm(tensors: Iterable[Tensor]) -> float | None:
    norm = whole(nn.utils.get_total_norm(tensors)).item()
    return norm if math.isfinite(norm) else None

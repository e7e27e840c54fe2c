"""Similarity of the experts' outputs, measured by running all experts on every token during a forward pass.

Shapes: N tokens, D model width, L MoE layers, E experts, F expert hidden width.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.experts.backends import Biases
from simbal.metrics.similarity import RunningSimilarity
from simbal.model.moe import FeedForward, MoELayer


class ExpertSimilarity:
    """Similarity of the experts' outputs per MoE layer and token."""

    def __init__(self, num_layers: int) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self.zero_outputs_L = [0] * num_layers

    def measure(self, index: int, layer: MoELayer, inputs: tuple[Tensor, ...]) -> None:
        """Measure one batch of MoE layer `index` before the layer's forward pass."""
        self.add(index, layer_similarity(inputs[0].flatten(0, 1), layer.w13_E2FD, layer.w2_EFD, layer.biases))

    def add(self, index: int, running: RunningSimilarity) -> None:
        """Add the similarity of one batch in MoE layer `index`."""
        self._parts[index].append(running.similarity_N.double().cpu())
        self.zero_outputs_L[index] += running.zero_outputs

    @property
    def similarity_LN(self) -> Tensor:
        """Mean pairwise similarity C of each token, (L, N), fp64; see `RunningSimilarity`."""
        return torch.stack([torch.cat(parts) for parts in self._parts])


@contextmanager
def record_similarity(feed_forwards: Sequence[MoELayer | FeedForward]) -> Iterator[ExpertSimilarity]:
    """Measure every forward pass inside the `with` block; the layers' outputs stay bit-identical."""
    layers = [layer for layer in feed_forwards if isinstance(layer, MoELayer)]
    similarity = ExpertSimilarity(len(layers))
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(similarity.measure, index)))
        yield similarity


@torch.no_grad()
def layer_similarity(x_ND: Tensor, w13_E2FD: Tensor, w2_EFD: Tensor, biases: Biases | None = None) -> RunningSimilarity:
    """Run every expert on every token in the compute dtype; no tensor exceeds one expert's (N, D) or (N, F)."""
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    running = RunningSimilarity()
    with torch.autocast(device, enabled=False):
        x_ND = x_ND.to(dtype)
        for expert, (w13_2FD, w2_FD) in enumerate(zip(w13_E2FD, w2_EFD, strict=True)):
            gate_NF, up_NF = (F.linear(x_ND, w_FD.to(dtype)) for w_FD in w13_2FD)
            if biases is None:
                running.add((F.silu(gate_NF) * up_NF) @ w2_FD.to(dtype))
            else:
                b13_2F, b2_D = biases[0][expert].to(dtype), biases[1][expert].to(dtype)
                running.add((F.silu(gate_NF + b13_2F[0]) * (up_NF + b13_2F[1])) @ w2_FD.to(dtype) + b2_D)
    return running

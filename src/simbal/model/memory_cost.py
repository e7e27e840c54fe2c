"""What one training step holds in memory, counted before anything is made.

Shapes: B sequences of S tokens in a micro-batch, N = B*S, V vocabulary, D model width, L layers, H heads, E experts,
K experts per token, F expert hidden width (K*F in a dense layer), R = N*K routed rows.
"""

from dataclasses import dataclass

import torch

from simbal.model.head import CHUNK_ELEMENTS
from simbal.model.parameters import count_parameters
from simbal.model.transformer import Transformer, TransformerShape

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
FP32, INT64 = 4, 8  # bytes
PADDED_ROWS = 128  # backend megablocks fills each expert's rows up to a multiple of this


@dataclass(frozen=True)
class Step:
    """What decides the memory of a step besides the model's shape."""

    micro_batch: int  # sequences, B
    seq_len: int  # S
    accumulates: bool  # several micro-batches make one optimizer step
    precision: str = "32-true"  # one of PRECISIONS
    backend: str | None = "torch"  # of the experts
    device: str = "cpu"  # its type
    recomputes: bool = False  # trainer.activation_checkpointing

    @property
    def tokens(self) -> int:
        """N."""
        return self.micro_batch * self.seq_len

    @property
    def compute(self) -> int:
        """Bytes of a number in matrix products, c."""
        return FP32 if self.precision == "32-true" else 2

    @property
    def stored(self) -> int:
        """Bytes of a weight, of its gradient and of each of its moments."""
        return 2 if self.precision == "bf16-true" else FP32


@dataclass(frozen=True)
class MemoryCost:
    """Bytes of one training step, by what they are for."""

    weights: int
    gradients: int
    moments: int  # AdamW's two
    activations: int  # that a micro-batch's forward pass keeps for its backward pass
    working: int  # the most that one layer or the head needs beside them while it is computed
    accumulates: bool

    @property
    def peak(self) -> int:
        """weights + moments + working + activations + gradients when micro-batches are accumulated.

        Else the larger of the last two: a gradient is made as the activations before it are given up.
        """
        more = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return self.weights + self.moments + self.working + more


def memory_cost(shape: TransformerShape, step: Step) -> MemoryCost:
    """Bytes of a step of a model of this shape; balancing strategies, which keep little, are left out.

    weights, gradients: `stored` for each parameter, moments twice that; activations: as `activation_bytes`.
    """
    with torch.device("meta"):
        model = Transformer(shape, step.backend if shape.num_experts else None)
    stored = step.stored * count_parameters(model)["total"]
    of_layer = _feed_forward_working(shape, step) + (layer_bytes(shape, step) if step.recomputes else 0)
    working = max(_head_working(shape, step), of_layer)
    return MemoryCost(stored, stored, 2 * stored, activation_bytes(shape, step), working, step.accumulates)


def activation_bytes(shape: TransformerShape, step: Step) -> int:
    """What a forward pass keeps for its backward pass, c being the bytes of the compute dtype.

    In each layer, and for the head:
        norms      2 (8 N D + 4 N)       input and normalised input in fp32, 1 / rms; on CUDA less
        attention  c 7 N D + 4 N H       its input, q k v (3), q and k turned (2), output; log-normalisers in fp32
                   + c B S^2             with `data.document_mask`
        router     4 N D                 its input in fp32, if that is a copy; and
                   16 N E + 4 N K        logits, probabilities (fp32), experts in order (int64); weights
        experts    c (N D + 2 R F) + 16 R   input, gate and up; order and its inverse (int64): backend torch
        dense      c (N D + 4 N K F)     input, gate, up, silu(gate), their product
        head       8 N D + 4 N + c (N D + V D)   the last norm; the gradients of its input and of its weight
    bf16-mixed adds c for each weight that is multiplied in bf16: 4 D^2 and 3 D F E in a layer. With
    trainer.activation_checkpointing a layer keeps its input alone.
    """
    N, D, c = step.tokens, shape.d_model, step.compute
    layer = step.stored * N * D if step.recomputes else layer_bytes(shape, step)
    rotation = 2 * FP32 * step.seq_len * D // shape.num_heads
    return shape.num_layers * layer + _norm(shape, step) + c * D * (N + shape.vocab_size) + rotation + INT64 * N


def layer_bytes(shape: TransformerShape, step: Step) -> int:
    """What one layer keeps, as `activation_bytes` says."""
    N, D, c = step.tokens, shape.d_model, step.compute
    attention = 7 * c * N * D + FP32 * N * shape.num_heads
    if shape.document_end is not None:
        attention += c * N * step.seq_len
    layer = 2 * _norm(shape, step) + attention + (_mixture(shape, step) if shape.num_experts else _dense(shape, step))
    if step.precision == "bf16-mixed":
        layer += c * (4 * D * D + _feed_forward_weights(shape))
    return layer


def _norm(shape: TransformerShape, step: Step) -> int:
    return 2 * FP32 * step.tokens * shape.d_model + FP32 * step.tokens


def _mixture(shape: TransformerShape, step: Step) -> int:
    """Router and experts of one layer."""
    N, D, E, K, F, c = step.tokens, shape.d_model, shape.num_experts, shape.top_k, shape.d_expert, step.compute
    R = N * K
    router = (2 * FP32 + INT64) * N * E + FP32 * R
    if c != FP32:
        router += FP32 * N * D
    if step.precision == "bf16-true":
        router += FP32 * D * E  # its weight in fp32
    experts = {
        "torch": 2 * c * R * F + 2 * INT64 * R,
        "fused": 2 * c * R * F + INT64 * R,
        "megablocks": 2 * c * (R + PADDED_ROWS * E) * F + 2 * INT64 * R,
        # the input twice, gate, up, silu(gate), their product, the output, and this weighted
        "reference": 4 * c * R * (D + F) + INT64 * R,
    }
    return router + c * N * D + experts[step.backend or "reference"]


def _dense(shape: TransformerShape, step: Step) -> int:
    return step.compute * step.tokens * (shape.d_model + 4 * max(1, shape.top_k) * shape.d_expert)


def _feed_forward_weights(shape: TransformerShape) -> int:
    """Parameters of one layer's experts, or of its dense feed-forward."""
    return 3 * shape.d_model * shape.d_expert * (shape.num_experts or max(1, shape.top_k))


def _head_working(shape: TransformerShape, step: Step) -> int:
    """Two chunks of logits in fp32, the copies of one in bf16, and the gradient of the weight in fp32."""
    V = shape.vocab_size
    rows = min(step.tokens, max(1, CHUNK_ELEMENTS[step.device] // V))
    copies = 0 if step.compute == FP32 else 2 * step.compute
    return (2 * FP32 + copies) * rows * V + FP32 * V * shape.d_model


def _feed_forward_working(shape: TransformerShape, step: Step) -> int:
    """Backward of one layer's feed-forward: rows of the output's and input's gradients, seven hidden widths of rows.

    And the gradient of its weights in the compute dtype.
    """
    rows = step.tokens * max(1, shape.top_k)
    width = 2 * shape.d_model + 7 * shape.d_expert
    return step.compute * (rows * width + _feed_forward_weights(shape))

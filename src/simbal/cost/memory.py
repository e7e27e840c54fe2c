"""The memory of one training step, on one device or on several that share it, counted before anything is made.

Shapes: B sequences of S tokens in a micro-batch, N = B*S, V vocabulary, D model width, L layers, H heads, G heads of
keys and values, P head width, E experts, K experts per token, Z shared experts, F expert hidden width (K*F in a dense
layer), R = N*K routed rows.
"""

import math
from dataclasses import dataclass
from typing import Literal

from simbal.cost.parameters import FP32, count, heads_width, qkv_width, weights_of
from simbal.model.head import CHUNK_ELEMENTS
from simbal.model.transformer import TransformerShape

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
INT64 = 8  # bytes


@dataclass(frozen=True)
class Step:
    """The settings that decide the memory of a step besides the model's shape."""

    micro_batch: int  # sequences, B
    seq_len: int  # S
    accumulates: bool  # several micro-batches make one optimizer step
    precision: str = "32-true"  # a `Precision`
    device: str = "cpu"  # its type

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, N."""
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
class DeviceMemory:
    """Bytes of one training step on one device, by what they are for."""

    weights: int
    gradients: int
    moments: int  # AdamW's two
    activations: int  # kept by a micro-batch's forward pass for its backward pass
    working: int  # the most that one layer or the head needs beside them while it is computed
    sharing: int  # the buffers for training together
    accumulates: bool

    @property
    def peak(self) -> int:
        """The most bytes at once.

        Gradients and activations count both when micro-batches are accumulated. Else only the larger of them counts, as
        a gradient is made while the activations before it are given up.
        """
        more = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return self.weights + self.moments + self.working + self.sharing + more


def device_memory(shape: TransformerShape, step: Step, strategy: str = "one device", gpus: int = 1) -> DeviceMemory:
    """Return the memory of one of `gpus` devices; balancing strategies, which keep little, are left out.

    ddp: gradients are summed in buckets as large as all of them together (torch's DistributedDataParallel, unless
    gradient_as_bucket_view). fsdp, as simbal.training.strategies cuts the model: each device holds its part of every
    parameter, gradient and moment; beside them whole weights and gradients of all but the feed-forwards, and of two
    feed-forwards, the one in use and the next.
    """
    weights = weights_of(shape)
    whole = own = step.stored * count(weights)
    sharing = 0
    if strategy == "ddp":
        sharing = whole
    elif strategy == "fsdp":
        feed_forwards = step.stored * count(weights, "ffn", "bias", "router")
        sharing = 2 * (whole - feed_forwards + min(2, shape.num_layers) * feed_forwards // shape.num_layers)
        own = math.ceil(whole / gpus)
    return DeviceMemory(
        weights=own,
        gradients=own,
        moments=2 * own,
        activations=activation_bytes(shape, step),
        working=_working_bytes(shape, step),
        sharing=sharing,
        accumulates=step.accumulates,
    )


def activation_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, c being the bytes of the compute dtype.

    In each layer, and for the head:
        norms      2 (8 N D + 4 N)       input and normalised input in fp32, 1 / rms; on CUDA less
        attention  c N (D + 3 H P + 3 G P) + 4 N H   input, q k v, turned queries and keys, output; log-normalisers
        qk_norm    4 N (H + G) P         normalised queries and keys in fp32; in bf16 also what they were before
        router     16 N E + 13 R         logits, probabilities, experts in order, weights; in bf16 4 N D: its input
        experts    c (N D + 2 R F) + 16 R    input, gate and up; order and its inverse
        dense      c (N D + 4 N K F)     input, gate, up, silu(gate), their product
        shared     c 4 N Z F             the same, but its input
        head       8 N D + 4 N + c (N D + V D)   the last norm; the gradients of its input and of its weight
    bf16-mixed adds c for each weight that is multiplied in bf16: 2 D P (H + G) and 3 D F (E + Z) in a layer.
    """
    N, D, H, G, P = step.tokens, shape.d_model, shape.num_heads, shape.kv_heads, shape.head_width
    E, F, K, Z, c = shape.num_experts, shape.d_expert, max(1, shape.top_k), shape.num_shared_experts, step.compute
    norm = 2 * FP32 * N * D + FP32 * N
    attention = c * N * (D + 3 * (H + G) * P) + FP32 * N * H
    if shape.qk_norm != "none":
        attention += (1 if c == FP32 else 2) * FP32 * N * (H + G) * P
    if E:
        router = 2 * FP32 * N * E + (FP32 + INT64 + 1) * N * K + (0 if c == FP32 else FP32 * N * D)
        experts = c * (N * D + 2 * N * K * F) + 2 * INT64 * N * K
        feed_forward = router + experts + 4 * c * N * Z * F
    else:
        feed_forward = c * (N * D + 4 * N * K * F)
    layer = 2 * norm + attention + feed_forward
    if step.precision == "bf16-mixed":
        layer += c * (D * (qkv_width(shape) + heads_width(shape)) + _feed_forward_weights(shape))
    return shape.num_layers * layer + norm + c * D * (N + shape.vocab_size)


def _working_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that the head or the backward pass of a feed-forward works in, whichever needs more.

    The head: two chunks of logits, and the gradient of its weight in fp32. A feed-forward: the rows of the output's and
    input's gradients, seven hidden widths of rows, and the gradient of its weights in the compute dtype.
    """
    V, c = shape.vocab_size, step.compute
    head = 2 * c * min(step.tokens * V, CHUNK_ELEMENTS[step.device]) + FP32 * V * shape.d_model
    rows = step.tokens * max(1, shape.top_k, shape.num_shared_experts)
    return max(head, c * (rows * (2 * shape.d_model + 7 * shape.d_expert) + _feed_forward_weights(shape)))


def _feed_forward_weights(shape: TransformerShape) -> int:
    """Return the parameters of one layer's experts, or of its dense feed-forward."""
    experts = shape.num_experts + shape.num_shared_experts if shape.num_experts else max(1, shape.top_k)
    return 3 * shape.d_model * shape.d_expert * experts

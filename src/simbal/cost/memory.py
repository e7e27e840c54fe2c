"""The memory of one training step, on one device or on several that share it, counted before anything is made.

Shapes: B sequences of S tokens in a micro-batch, N = B*S, V vocabulary, D model width, L layers, H heads, G heads of
keys and values, P head width, E experts, K experts per token, Z shared experts, F expert hidden width (K*F in a dense
layer), R = N*K routed rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from simbal.config.values import divisors
from simbal.cost.parameters import FP32, count, heads_width, qkv_width, weights_of
from simbal.model.head import CHUNK_ELEMENTS, MULTIPLE
from simbal.model.transformer import TransformerShape

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
INT64 = 8  # bytes
PADDED_ROWS = 128  # backend megablocks fills each expert's rows up to a multiple of this


@dataclass(frozen=True)
class Step:
    """The settings that decide the memory of a step besides the model's shape."""

    micro_batch: int  # sequences, B
    seq_len: int  # S
    accumulates: bool  # several micro-batches make one optimizer step
    precision: str = "32-true"  # a `Precision`
    backend: str | None = "torch"  # of the experts
    device: str = "cpu"  # its type
    recomputes: bool = False  # trainer.activation_checkpointing

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
    accumulates: bool
    sharing: int = 0  # the buffers for training together

    @property
    def peak(self) -> int:
        """The most bytes at once.

        weights + moments + working + sharing + activations + gradients when micro-batches are accumulated; else only
        the larger of the last two counts, as a gradient is made while the activations before it are given up.
        """
        more = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return self.weights + self.moments + self.working + self.sharing + more


def memory_cost(shape: TransformerShape, step: Step) -> DeviceMemory:
    """Return the bytes of a step of a model of this shape; balancing strategies, which keep little, are left out.

    weights, gradients: `stored` for each parameter, moments twice that; activations: as `activation_bytes`.
    """
    stored = step.stored * count(weights_of(shape))
    of_layer = _feed_forward_working(shape, step) + (layer_bytes(shape, step) if step.recomputes else 0)
    working = max(_head_working(shape, step), of_layer)
    return DeviceMemory(stored, stored, 2 * stored, activation_bytes(shape, step), working, step.accumulates)


def activation_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, c being the bytes of the compute dtype.

    In each layer, and for the head:
        norms      2 (8 N D + 4 N)       input and normalised input in fp32, 1 / rms; on CUDA less
        attention  as `attention_bytes`; c 7 N D + 4 N H in the paper's models
        router     4 N D                 its input in fp32, if that is a copy; and
                   16 N E + 4 N K        logits, probabilities (fp32), experts in order (int64); weights
        experts    c (N D + 2 R F) + 16 R   input, gate and up; order and its inverse (int64): backend torch
        dense      c (N D + 4 N K F)     input, gate, up, silu(gate), their product
        shared     c 4 N Z F             the same, but its input, c N D, only where the experts keep another
        head       8 N D + 4 N + c (N D + V D)   the last norm; the gradients of its input and of its weight
    bf16-mixed adds c for each weight that is multiplied in bf16: 2 D P (H + G) and 3 D F (E + Z) in a layer. With
    trainer.activation_checkpointing a layer keeps its input alone.
    """
    N, D, c = step.tokens, shape.d_model, step.compute
    layer = step.stored * N * D if step.recomputes else layer_bytes(shape, step)
    rotation = 2 * FP32 * step.seq_len * shape.head_width
    return shape.num_layers * layer + _norm(shape, step) + c * D * (N + shape.vocab_size) + rotation + INT64 * N


def layer_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that one layer keeps for its backward pass, as `activation_bytes` lists them."""
    feed_forward = _mixture(shape, step) if shape.num_experts else _dense(shape, step)
    layer = 2 * _norm(shape, step) + attention_bytes(shape, step) + feed_forward
    if step.precision == "bf16-mixed":
        of_attention = shape.d_model * (qkv_width(shape) + heads_width(shape))
        layer += step.compute * (of_attention + _feed_forward_weights(shape))
    return layer


def attention_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that the attention of one layer keeps for its backward pass.

        c N (D + 2 H P) + 4 N H   its input, turned queries, output; log-normalisers in fp32
        c N (G P + (H + 2 G) P)   turned keys, and the values within q k v; with G < H instead
        c N 2 H P                 the keys and values of each head of queries
        c B S^2                   with `data.document_mask`
    `model.qk_norm` adds in fp32 the normalised queries and keys, 4 N (H + G) P, and 1 / rms; and what they were before,
    which is in q k v in fp32 (kept anyway with G = H), and as much again in bf16.
    """
    N, H, G, c = step.tokens, shape.num_heads, shape.kv_heads, step.compute
    qkv, queries_and_keys = c * N * qkv_width(shape), FP32 * N * (H + G) * shape.head_width
    kept = c * N * (shape.d_model + 2 * heads_width(shape)) + FP32 * N * H
    kept += 2 * c * N * heads_width(shape) if G < H else c * N * G * shape.head_width + qkv
    if shape.document_end is not None:
        kept += c * N * step.seq_len
    if shape.qk_norm != "none":
        kept += queries_and_keys + FP32 * N * (H + G if shape.qk_norm == "head" else 2)
        kept += queries_and_keys if c != FP32 else qkv * (G < H)
    return kept


def strategies(gpus: int) -> tuple[str, ...]:
    """Return the ways in which the devices can share the work; one device has nothing to share."""
    return ("ddp", "fsdp") if gpus > 1 else ("one device",)


def device_memory(strategy: str, shape: TransformerShape, step: Step, gpus: int) -> DeviceMemory:
    """Return the memory of one of `gpus` devices.

    ddp: gradients are summed in buckets as large as all of them together (torch's DistributedDataParallel, unless
    gradient_as_bucket_view). fsdp, as simbal.training.parallel cuts the model: each device holds its rows of every
    parameter, gradient and moment; beside them whole weights and gradients of all but the feed-forwards, and of two
    feed-forwards, the one in use and the next.

    Two processes on a CPU (tiny, small; November 2026) took 0.98 to 1.01 of it with ddp, 0.89 to 0.93 with fsdp.
    """
    alone = memory_cost(shape, step)
    if strategy == "ddp":
        return replace(alone, sharing=alone.gradients)
    if strategy != "fsdp":
        return alone
    weights = weights_of(shape)
    part = step.stored * sum(w.copies * math.ceil(w.size[0] / gpus) * math.prod(w.size[1:]) for w in weights)
    feed_forwards = count(weights, "ffn", "bias", "router")
    together = count(weights) - feed_forwards + min(2, shape.num_layers) * feed_forwards // shape.num_layers
    return replace(alone, weights=part, gradients=part, moments=2 * part, sharing=2 * step.stored * together)


def largest_micro_batch(memory_of: Callable[[int], DeviceMemory], sequences: int, limit: float) -> int | None:
    """Return the largest micro-batch whose step, `memory_of` it, needs at most `limit` bytes; None if none does.

    It divides the `sequences` that each device has of the global batch.
    """
    return next((size for size in reversed(divisors(sequences)) if memory_of(size).peak <= limit), None)


def _norm(shape: TransformerShape, step: Step) -> int:
    return 2 * FP32 * step.tokens * shape.d_model + FP32 * step.tokens


def _mixture(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that the router and the experts of one layer keep."""
    N, D, E, K, F, c = step.tokens, shape.d_model, shape.num_experts, shape.top_k, shape.d_expert, step.compute
    R = N * K
    router = 2 * FP32 * N * E + (FP32 + INT64 + 1) * R  # with the chosen experts, and which slots are empty
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
    return router + c * N * D + experts[step.backend or "reference"] + _shared(shape, step)


def _shared(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that the shared experts of one layer keep.

    Their input is one that the mixture keeps, unless both cast it, or that keeps it in fp32 and its rows alone.
    """
    if not shape.num_shared_experts:
        return 0
    alone = step.precision == "bf16-mixed" or (step.precision == "bf16-true" and step.backend == "reference")
    width = 4 * shape.num_shared_experts * shape.d_expert + (shape.d_model if alone else 0)
    return step.compute * step.tokens * width


def _dense(shape: TransformerShape, step: Step) -> int:
    return step.compute * step.tokens * (shape.d_model + 4 * max(1, shape.top_k) * shape.d_expert)


def _feed_forward_weights(shape: TransformerShape) -> int:
    """Return the parameters of one layer's experts, or of its dense feed-forward."""
    experts = shape.num_experts + shape.num_shared_experts if shape.num_experts else max(1, shape.top_k)
    return 3 * shape.d_model * shape.d_expert * experts


def _head_working(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that the head works in.

    They are two chunks of logits, or on a CPU three of bf16 and one of fp32, the gradient of the weight in fp32, and
    the weight once more if the vocabulary is padded.
    """
    V = shape.vocab_size
    rows = min(step.tokens, max(1, CHUNK_ELEMENTS[step.device] // V))
    rounded_on_cpu = step.device == "cpu" and step.compute != FP32
    of_logit = 3 * step.compute + FP32 if rounded_on_cpu else 2 * step.compute
    of_weight = FP32 + (step.compute if V % MULTIPLE[step.device] else 0)
    return of_logit * rows * V + of_weight * V * shape.d_model


def _feed_forward_working(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that the backward pass of one layer's feed-forward works in.

    They are the rows of the output's and input's gradients, seven hidden widths of rows, and the gradient of its
    weights in the compute dtype.
    """
    rows = step.tokens * max(1, shape.top_k, shape.num_shared_experts)
    width = 2 * shape.d_model + 7 * shape.d_expert
    return step.compute * (rows * width + _feed_forward_weights(shape))

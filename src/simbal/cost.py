"""The cost of a model of any shape, computed without building it: parameters, FLOPs, and memory of a training step.

Shapes: B sequences of S tokens in a micro-batch, N = B*S, V vocabulary, D model width, L layers, H heads, G heads of
keys and values, P head width, E experts, K experts per token, Z shared experts, F expert width (K*F in a dense layer),
R = N*K routed rows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from simbal.model.head import CHUNK_ELEMENTS
from simbal.model.transformer import Transformer, TransformerShape

FP32, INT64 = 4, 8  # bytes
PARTS = ("embedding", "head", "attention", "ffn", "bias", "router", "norms", "table")
Precision = Literal["32-true", "bf16-mixed", "bf16-true"]


class Weights(NamedTuple):
    """Weights of the same size in one part of a model."""

    part: str  # one of `PARTS`
    copies: int
    size: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """The number of parameters in all copies."""
        return self.copies * math.prod(self.size)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model by part, and the FLOPs that follow from them."""

    shape: TransformerShape
    embedding: int  # V D
    head: int  # V D, or 0 if tied to the embedding
    attention: int  # 2 D P (H + G) L, which is 4 D^2 L in the paper's models
    ffn: int  # 3 D F L, times E + Z in a mixture
    ffn_active: int  # 3 D F L, times K + Z in a mixture
    router: int  # D E L
    norms: int  # (2 L + 1) D; model.qk_norm adds 2 P L (head) or P (H + G) L (projection)
    bias: int  # 0, or (2 F + D) L, times E in a mixture, plus (2 Z F + D) L for shared experts
    bias_active: int  # the same with K instead of E
    table: int  # 0, or V D L with model.token_table, as many as V / (3 F) experts in each layer
    table_active: int  # 0, or D L: a token uses one row per layer, by lookup

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def active(self) -> int:
        """Parameters used per token."""
        return self.total - self.ffn + self.ffn_active - self.bias + self.bias_active - self.table + self.table_active

    @property
    def without_embedding(self) -> int:
        """N of 6 N T: active parameters without token tables, and without the input embedding unless it is tied."""
        return self.active - self.table_active - (0 if self.shape.tie_embeddings else self.embedding)

    @property
    def matrices(self) -> int:
        """M: active parameters of matrix products."""
        return self.without_embedding - self.norms - self.bias_active

    @property
    def every_expert(self) -> float:
        """Parameters of a pass through all E experts, as a multiple of N."""
        return 1 + (self.ffn - self.ffn_active + self.bias - self.bias_active) / self.without_embedding

    def forward_flops(self, seq_len: int) -> int:
        """Return the FLOPs of a forward pass per token: 2 M + 2 L H P (S + 1), where H P = D in the paper's models.

        The products q k^T and p v cost 4 H P per attended position, on average (S + 1) / 2 per token.
        """
        return 2 * self.matrices + 2 * self.shape.num_layers * heads_width(self.shape) * (seq_len + 1)

    def training_flops(self, seq_len: int, tokens: int) -> int:
        """Return the FLOPs of training on `tokens`: the backward pass costs twice the forward pass."""
        return 3 * self.forward_flops(seq_len) * tokens

    def estimated_flops(self, tokens: int) -> int:
        """Return the common estimate of the training FLOPs, 6 N T, where T = `tokens`."""
        return 6 * self.without_embedding * tokens


def parameters(shape: TransformerShape) -> Parameters:
    """Return the parameter counts of a model of this shape."""
    weights = weights_of(shape)
    by_part = {part: count(weights, part) for part in PARTS}
    per_token = weights_of(replace(shape, num_experts=shape.top_k)) if shape.num_experts else weights
    active = {f"{part}_active": count(per_token, part) for part in ("ffn", "bias")}
    table_active = by_part["table"] // shape.vocab_size
    return Parameters(shape, **active, table_active=table_active, **by_part)


def count_parameters(model: Transformer) -> dict[str, int]:
    """Return the numbers of `total`, `active`, `embedding`, `experts` (including shared) and `router` parameters."""
    counted = parameters(model.shape)
    return {
        "total": counted.total,
        "active": counted.active,
        "embedding": counted.embedding,
        "experts": counted.ffn + counted.bias,
        "router": counted.router,
    }


def count(weights: Iterable[Weights], *parts: str) -> int:
    """Return the number of parameters in `weights`, or in the given `parts` of them."""
    return sum(each.numbers for each in weights if not parts or each.part in parts)


def weights_of(shape: TransformerShape) -> list[Weights]:
    """Return all weights of a model of this shape."""
    V, D, L, E, F = shape.vocab_size, shape.d_model, shape.num_layers, shape.num_experts, shape.d_expert
    weights = [
        Weights("embedding", 1, (V, D)),
        Weights("attention", L, (qkv_width(shape), D)),
        Weights("attention", L, (D, heads_width(shape))),
        Weights("norms", 2 * L + 1, (D,)),
    ]
    if shape.token_table:
        weights.append(Weights("table", L, (V, D)))
    if not shape.tie_embeddings:
        weights.append(Weights("head", 1, (V, D)))
    if shape.qk_norm != "none":
        heads = (1, 1) if shape.qk_norm == "head" else (shape.num_heads, shape.kv_heads)
        weights += [Weights("norms", L, (number * shape.head_width,)) for number in heads]
    if not E:
        return weights + _dense_feed_forward(shape, max(1, shape.top_k) * F)
    weights += [Weights("router", L, (E, D)), Weights("ffn", L, (E, 2, F, D)), Weights("ffn", L, (E, F, D))]
    if shape.bias:
        weights += [Weights("bias", L, (E, 2, F)), Weights("bias", L, (E, D))]
    if shape.num_shared_experts:
        weights += _dense_feed_forward(shape, shape.num_shared_experts * F)
    return weights


def _dense_feed_forward(shape: TransformerShape, width: int) -> list[Weights]:
    D, L = shape.d_model, shape.num_layers
    biases = [Weights("bias", L, (2, width)), Weights("bias", L, (D,))] if shape.bias else []
    return [Weights("ffn", L, (2, width, D)), Weights("ffn", L, (width, D)), *biases]


def heads_width(shape: TransformerShape) -> int:
    """Return the width of all heads, H P."""
    return shape.num_heads * shape.head_width


def qkv_width(shape: TransformerShape) -> int:
    """Return the width of queries, keys and values, (H + 2 G) P."""
    return (shape.num_heads + 2 * shape.kv_heads) * shape.head_width


@dataclass(frozen=True)
class Step:
    """The settings of a training step that affect its memory, besides the model's shape."""

    micro_batch: int  # sequences, B
    seq_len: int  # S
    accumulates: bool  # whether an optimizer step has several micro-batches
    precision: str = "32-true"  # a `Precision`
    device: str = "cpu"  # cpu | cuda
    muon: bool = False  # optim=muon instead of AdamW

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
    """Bytes of one training step on one device, by purpose."""

    weights: int
    gradients: int
    moments: int  # see `moments`
    activations: int  # kept by the forward pass of a micro-batch for its backward pass
    working: int  # temporary memory of one layer or the head, whichever needs more
    sharing: int  # buffers of ddp or fsdp
    accumulates: bool

    @property
    def peak(self) -> int:
        """The peak memory in bytes.

        With several micro-batches, gradients and activations exist together. Otherwise only the larger of the two
        counts, because the backward pass frees activations while it creates gradients.
        """
        backward = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return self.weights + self.moments + self.working + self.sharing + backward


def device_memory(shape: TransformerShape, step: Step, strategy: str = "one device", gpus: int = 1) -> DeviceMemory:
    """Return the memory of one of `gpus` devices, without balancing strategies, which need little.

    ddp: DistributedDataParallel sums gradients in buckets, which together are as large as all gradients. fsdp: each
    device holds its shard of every parameter, gradient and moment. It also holds the full weights and gradients of two
    feed-forwards (the current and the next one) and of everything outside the feed-forwards; see
    simbal.training.strategies.
    """
    weights = weights_of(shape)
    full = shard = step.stored * count(weights)
    sharing = 0
    if strategy == "ddp":
        sharing = full
    elif strategy == "fsdp":
        feed_forwards = step.stored * count(weights, "ffn", "bias", "router")
        sharing = 2 * (full - feed_forwards + min(2, shape.num_layers) * feed_forwards // shape.num_layers)
        shard = math.ceil(full / gpus)
    return DeviceMemory(
        weights=shard,
        gradients=shard,
        moments=math.ceil(step.stored * moments(shape, step.muon) * shard / full),
        activations=activation_bytes(shape, step),
        working=_working_bytes(shape, step),
        sharing=sharing,
        accumulates=step.accumulates,
    )


def moments(shape: TransformerShape, muon: bool) -> int:
    """Return how many numbers the optimizer keeps: two per weight, but one per weight that Muon updates."""
    weights = weights_of(shape)
    return 2 * count(weights) - (count(weights, "attention", "ffn") if muon else 0)


def activation_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, where c is the bytes of the compute dtype.

    In each layer, and for the head:
        norms      2 (8 N D + 4 N)       input and normalized input in fp32, 1 / rms; less on CUDA
        attention  c N (D + 3 H P + 3 G P) + 4 N H   input, q k v, rotated q and k, output; log-normalizers
        qk_norm    4 N (H + G) P         normalized queries and keys in fp32; in bf16 also their inputs
        router     16 N E + 13 R         logits, probabilities, sorted experts, weights; in bf16 4 N D for its input;
                   with router_input=embedding 4 N D + 4 N for the normalized embedding
        experts    c (N D + 2 R F) + 16 R    input, gate and up; order and its inverse
        dense      c (N D + 4 N K F)     input, gate, up, silu(gate), their product
        shared     c 4 N Z F             the same without the input
        head       8 N D + 4 N + c (N D + V D)   the last norm; gradients of its input and weight
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
        router += 0 if shape.router_input == "hidden" else FP32 * N * (D + 1)
        experts = c * (N * D + 2 * N * K * F) + 2 * INT64 * N * K
        feed_forward = router + experts + 4 * c * N * Z * F
    else:
        feed_forward = c * (N * D + 4 * N * K * F)
    layer = 2 * norm + attention + feed_forward
    if step.precision == "bf16-mixed":
        layer += c * (D * (qkv_width(shape) + heads_width(shape)) + _feed_forward_weights(shape))
    return shape.num_layers * layer + norm + c * D * (N + shape.vocab_size)


def _working_bytes(shape: TransformerShape, step: Step) -> int:
    """Return the temporary memory of the head or of a feed-forward's backward pass, whichever needs more.

    The head: two chunks of logits, and the gradient of its weight in fp32. A feed-forward: rows of the output's and
    input's gradients, rows of seven hidden widths, and the gradient of its weights in the compute dtype.
    """
    V, c = shape.vocab_size, step.compute
    head = 2 * c * min(step.tokens * V, CHUNK_ELEMENTS[step.device]) + FP32 * V * shape.d_model
    rows = step.tokens * max(1, shape.top_k, shape.num_shared_experts)
    return max(head, c * (rows * (2 * shape.d_model + 7 * shape.d_expert) + _feed_forward_weights(shape)))


def _feed_forward_weights(shape: TransformerShape) -> int:
    """Return the parameters of one layer's experts, or of its dense feed-forward."""
    experts = shape.num_experts + shape.num_shared_experts if shape.num_experts else max(1, shape.top_k)
    return 3 * shape.d_model * shape.d_expert * experts

"""The number of parameters of a model, their bytes and their FLOPs, counted for any shape; no model is made.

Shapes: V vocabulary, D model width, L layers, H heads, G heads of keys and values, P head width, E experts, of which a
token chooses K, Z shared experts, F expert hidden width (K*F in a dense layer).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from simbal.model.transformer import Transformer, TransformerShape

FP32 = 4  # bytes of a weight as it is made

PARTS = ("embedding", "head", "attention", "ffn", "bias", "router", "norms")


class Weights(NamedTuple):
    """Equally large weights of one part of a model."""

    part: str  # embedding | head | attention | ffn | bias | router | norms
    copies: int
    size: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """The number of parameters in all copies together."""
        return self.copies * math.prod(self.size)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model, by part."""

    shape: TransformerShape
    embedding: int  # V D
    head: int  # V D, a weight of its own beside the embedding; 0 if they are tied
    attention: int  # 2 D P (H + G) L, which is 4 D^2 L in the paper's models
    ffn: int  # 3 D F L, times E + Z of a mixture
    ffn_active: int  # 3 D F L, times K + Z of a mixture
    router: int  # D E L
    norms: int  # (2 L + 1) D; with model.qk_norm also 2 P L (head), or P (H + G) L (projection)
    bias: int  # (2 F + D) L, times E of a mixture, and (2 Z F + D) L of shared experts; 0 without
    bias_active: int  # the same with K for E

    @property
    def total(self) -> int:
        """The number of all parameters."""
        return self.embedding + self.head + self.attention + self.ffn + self.router + self.norms + self.bias

    @property
    def active(self) -> int:
        """The number of parameters that one token passes through."""
        return self.total - self.ffn + self.ffn_active - self.bias + self.bias_active

    @property
    def without_embedding(self) -> int:
        """N of 6 N T: active, less the input embedding, which is looked up and not multiplied; a tied one is both."""
        return self.active - self._looked_up

    @property
    def matrices(self) -> int:
        """M: active parameters that a token's vector is multiplied by."""
        return self.without_embedding - self.norms - self.bias_active

    @property
    def every_expert(self) -> float:
        """The multiple of N that a pass through all E experts needs, each token through each of them once."""
        return (self.total - self._looked_up) / self.without_embedding

    @property
    def ffn_routed(self) -> int:
        """3 D F L E: the experts among which the router chooses, without shared ones."""
        return 3 * self.shape.d_model * self.shape.d_expert * self.shape.num_layers * self.shape.num_experts

    @property
    def _looked_up(self) -> int:
        """The number of parameters that nothing is multiplied by."""
        return 0 if self.shape.tie_embeddings else self.embedding

    def forward_flops(self, seq_len: int) -> int:
        """Return the FLOPs of a forward pass per token: 2 M + 2 L H P (S + 1), with H P = D in the paper's models.

        The products q k^T and p v take 4 H P for each position seen, and a token sees (S + 1) / 2 on average.
        """
        return 2 * self.matrices + 2 * self.shape.num_layers * heads_width(self.shape) * (seq_len + 1)

    def training_flops(self, seq_len: int, tokens: int) -> int:
        """Return the FLOPs of training on `tokens`: three times forward.

        The backward pass multiplies for the inputs and for the weights.
        """
        return 3 * self.forward_flops(seq_len) * tokens

    def estimated_flops(self, tokens: int) -> int:
        """Return the usual estimate of the training FLOPs, 6 N T, with T = `tokens`."""
        return 6 * self.without_embedding * tokens


def heads_width(shape: TransformerShape) -> int:
    """Return the width of all heads together, H P."""
    return shape.num_heads * shape.head_width


def qkv_width(shape: TransformerShape) -> int:
    """Return the width of queries, keys and values together, (H + 2 G) P."""
    return (shape.num_heads + 2 * shape.kv_heads) * shape.head_width


def weights_of(shape: TransformerShape) -> list[Weights]:
    """Return every weight of a model of this shape."""
    V, D, L = shape.vocab_size, shape.d_model, shape.num_layers
    return [
        Weights("embedding", 1, (V, D)),
        *([] if shape.tie_embeddings else [Weights("head", 1, (V, D))]),
        Weights("attention", L, (qkv_width(shape), D)),
        Weights("attention", L, (D, heads_width(shape))),
        *_feed_forward(shape),
        Weights("norms", 2 * L + 1, (D,)),
        *_qk_norms(shape),
    ]


def _feed_forward(shape: TransformerShape) -> list[Weights]:
    """Return the weights of experts and router, or of dense feed-forwards."""
    D, L, E, width = shape.d_model, shape.num_layers, shape.num_experts, shape.d_expert
    if not E:
        return _dense(shape, max(1, shape.top_k) * width)
    mixture = [Weights("router", L, (E, D)), Weights("ffn", L, (E, 2, width, D)), Weights("ffn", L, (E, width, D))]
    if shape.bias:
        mixture += [Weights("bias", L, (E, 2, width)), Weights("bias", L, (E, D))]
    return mixture + (_dense(shape, shape.num_shared_experts * width) if shape.num_shared_experts else [])


def _dense(shape: TransformerShape, width: int) -> list[Weights]:
    """Return the weights of a feed-forward in each layer that computes every token."""
    D, L = shape.d_model, shape.num_layers
    biases = [Weights("bias", L, (2, width)), Weights("bias", L, (D,))] if shape.bias else []
    return [Weights("ffn", L, (2, width, D)), Weights("ffn", L, (width, D)), *biases]


def _qk_norms(shape: TransformerShape) -> list[Weights]:
    """Return the gains of the norms of queries and keys, if there are any."""
    if shape.qk_norm == "none":
        return []
    heads = (1, 1) if shape.qk_norm == "head" else (shape.num_heads, shape.kv_heads)
    return [Weights("norms", shape.num_layers, (number * shape.head_width,)) for number in heads]


def parameters(shape: TransformerShape) -> Parameters:
    """Return the parameter counts of a model of this shape, which is not built."""
    weights = weights_of(shape)
    of_part = {part: count(weights, part) for part in PARTS}
    of_a_token = weights_of(replace(shape, num_experts=shape.top_k)) if shape.num_experts else weights
    active = {f"{part}_active": count(of_a_token, part) for part in ("ffn", "bias")}
    return Parameters(shape, **active, **of_part)


def count(weights: Iterable[Weights], *parts: str) -> int:
    """Return the number of parameters in `weights`, or in those `parts` of it that are named."""
    return sum(each.numbers for each in weights if not parts or each.part in parts)


def count_parameters(model: Transformer) -> dict[str, int]:
    """Count the parameters of a built model.

    Returns:
        `total`, `active` (those that one token passes through, K of the E experts), `embedding`, `experts` (shared
            ones among them) and `router`.
    """
    counted = parameters(model.shape)
    return {
        "total": counted.total,
        "active": counted.active,
        "embedding": counted.embedding,
        "experts": counted.ffn + counted.bias,
        "router": counted.router,
    }

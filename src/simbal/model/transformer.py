"""The paper's decoder: pre-norm RMSNorm, RoPE attention, SwiGLU experts in every layer, untied embeddings.

Grouped-query attention, QK-norm and tied embeddings are options that the paper does not use. Only feed-forward layers
can have biases.
Reference: arXiv 2506.14038, section 3.2 and table 1.
Shapes: B batch, S sequence, V vocabulary, D model width, P head width, L MoE layers, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simbal.model.attention import Attention, KeyValueCache, LayerCache, document_mask, rotary_angles
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.native import RMSNorm
from simbal.model.router import Router, Routing, Steering


@dataclass(frozen=True)
class TransformerShape:
    """The sizes and options of a Transformer; `num_experts=0` makes it dense.

    A dense feed-forward layer is as wide as `top_k` experts together, so dense and sparse models have the same active
    parameters, except for the router.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    d_expert: int
    num_experts: int
    top_k: int
    rope_theta: float
    norm_eps: float
    gating: str
    renormalize: bool
    bias: bool = False  # in every feed-forward layer
    document_end: int | None = None  # last token of a document, which attention does not cross; None: no document mask
    num_kv_heads: int | None = None  # None: `num_heads`
    head_dim: int | None = None  # None: d_model / num_heads
    qk_norm: str = "none"  # none | head | projection
    tie_embeddings: bool = False  # the head shares the embedding's weight
    num_shared_experts: int = 0  # used by every token, in addition to the `top_k` chosen experts
    router_scale: float = 1.0  # multiplier of the weights of the chosen experts
    router_input: str = "hidden"  # hidden | embedding
    token_table: bool = False  # a learned vector per token id and block, added to the residual stream
    attention_scale: float | None = None  # factor of q k^T; None: 1 / sqrt(head width)

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, G."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """The width of a head, P."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


class Block(nn.Module):
    """A decoder block: x += attention(norm(x)), then x += feed_forward(norm(x)).

    With a token table, x += table[token id] follows. `router_input=embedding` gives the router norm(embedding) in place
    of norm(x), with the gain of the same norm.
    """

    def __init__(self, shape: TransformerShape, layer: int, backend: str | None, kernels: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.d_model, shape.norm_eps, kernels)
        self.attention = Attention(
            shape.d_model, shape.num_heads, shape.kv_heads, shape.head_width, shape.qk_norm, shape.norm_eps, kernels,
            shape.attention_scale,
        )  # fmt: skip
        self.feed_forward_norm = RMSNorm(shape.d_model, shape.norm_eps, kernels)
        self.feed_forward: MoELayer | FeedForward = (
            MoELayer(
                Router(
                    shape.d_model, shape.num_experts, shape.top_k, shape.gating, shape.renormalize, layer,
                    shape.router_scale,
                ),
                shape.d_model, shape.d_expert, backend, shape.bias, shape.num_shared_experts,
            )
            if shape.num_experts
            else FeedForward(shape.d_model, max(1, shape.top_k) * shape.d_expert, shape.bias)
        )  # fmt: skip
        self.token_table = nn.Embedding(shape.vocab_size, shape.d_model) if shape.token_table else None

    def forward(
        self,
        x_BSD: Tensor,
        rotation_2SP: Tensor,
        visible_B1SS: Tensor | None,
        tokens_BS: Tensor,
        steering: Steering | None,
        past: LayerCache | None,
        embedding_BSD: Tensor | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Return the residual stream after the block, (B, S, D), and the block's routing (None if dense).

        With `embedding_BSD`, the embeddings of the tokens, the router reads them.
        """
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation_2SP, visible_B1SS, past)
        h_BSD = self.feed_forward_norm(x_BSD)
        if isinstance(self.feed_forward, MoELayer):
            read_BSD = h_BSD if embedding_BSD is None else self.feed_forward_norm(embedding_BSD)
            y_BSD, routing = self.feed_forward(h_BSD, tokens_BS, steering, read_BSD)
        else:
            y_BSD, routing = self.feed_forward(h_BSD), None
        x_BSD = x_BSD + y_BSD
        return x_BSD if self.token_table is None else x_BSD + self.token_table(tokens_BS), routing


class Transformer(nn.Module):
    """The decoder, from token ids to the normalized hidden states that the language-model head takes.

    The head's weight is `head_VD`; with tied embeddings it is the embedding's parameter.
    """

    def __init__(
        self,
        shape: TransformerShape,
        backend: str | None = "reference",
        activation_checkpointing: bool = False,
        kernels: str = "torch",
    ) -> None:
        """Create the layers without initializing their weights.

        Args:
            shape: sizes and options of the model.
            backend: name of the expert backend; None for a dense model.
            activation_checkpointing: keep only the input of each block and recompute the rest in the backward pass.
                Results are bit-identical.
            kernels: torch or native, for attention and the head.
        """
        super().__init__()
        self.shape, self.backend, self.activation_checkpointing = shape, backend, activation_checkpointing
        self.kernels = kernels
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape, layer, backend, kernels) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.d_model, shape.norm_eps, kernels)
        untied = not shape.tie_embeddings
        self.head_VD = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model)) if untied else self.embedding.weight

    def forward(
        self, tokens_BS: Tensor, steering: Steering | None = None, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, list[Routing]]:
        """Return the hidden states, (B, S, D), and one `Routing` per MoE layer; `steering` acts on every router.

        With a cache, `tokens_BS` continues the cached tokens, and the results cover only `tokens_BS`.
        """
        new, document_end = tokens_BS.shape[1], self.shape.document_end
        length = new if cache is None else cache.append(tokens_BS).shape[1]
        theta, device = self.shape.rope_theta, tokens_BS.device
        rotation_2SP = rotary_angles(length, self.shape.head_width, theta, device)[:, -new:]
        if cache is not None:
            visible_B1SS: Tensor | None = cache.visible(new, document_end)
        else:
            visible_B1SS = None if document_end is None else document_mask(tokens_BS, document_end)
        x_BSD = self.embedding(tokens_BS)
        embedding_BSD = x_BSD if self.shape.router_input == "embedding" else None
        routings = []
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            run: Callable[..., Any] = partial(checkpoint, block, use_reentrant=False) if recompute else block
            past = None if cache is None else cache.layers[layer]
            x_BSD, routing = run(x_BSD, rotation_2SP, visible_B1SS, tokens_BS, steering, past, embedding_BSD)
            if routing is not None:
                routings.append(routing)
        return self.norm(x_BSD), routings

    @property
    def feed_forwards(self) -> list[MoELayer | FeedForward]:
        """The feed-forward layer of each block."""
        return [block.feed_forward for block in self.blocks]  # type: ignore[misc]

    @property
    def routers(self) -> list[Router]:
        """The router of each MoE layer; empty if the model is dense."""
        return [layer.router for layer in self.feed_forwards if isinstance(layer, MoELayer)]

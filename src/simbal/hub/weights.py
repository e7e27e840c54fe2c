"""The names of a Transformer's weights in Hugging Face's format, those of its architecture.

Each name has a view of our parameter, so that the same list writes a folder and reads one. These are the classic names,
with a matrix for each expert: transformers merges the experts when it reads them, and writes these names again.
Reference: transformers 5.23, models/mixtral, llama, olmoe, qwen3 and qwen3_moe, and conversion_mapping.py.
Shapes: V vocabulary, D model width, L layers, E experts, F hidden width of an expert or of the dense feed-forward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from simbal.hub.architecture import MIXTRAL, architecture
from simbal.model.attention import Attention
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.transformer import Block, Transformer, TransformerShape

HEAD = "lm_head.weight"
OUTSIDE_LAYERS, OF_A_LAYER = 3, 6  # weights; a sparse layer has one more, and each feed-forward or expert three
OF_AN_EXPERT = 3
IN_MIXTRAL, ELSEWHERE = ("block_sparse_moe", "w1", "w3", "w2"), ("mlp", "gate_proj", "up_proj", "down_proj")


def views(model: Transformer) -> dict[str, Tensor]:
    """Return a view of every weight by its name on disk; what is copied into a view is copied into the model.

    Matrices are (out, in). A router whose weight is computed (`ortho_param`) gives what it computes now, into which
    nothing can be copied. Tied embeddings have one name, as in files that transformers writes.
    """
    named = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    if not model.shape.tie_embeddings:
        named[HEAD] = model.head_VD
    names = IN_MIXTRAL if architecture(model.shape) is MIXTRAL else ELSEWHERE
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{layer}."
        named |= {
            f"{prefix}input_layernorm.weight": block.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": block.feed_forward_norm.weight,
        }
        for name, weight in (*_attention(block.attention), *_feed_forward(block.feed_forward, *names)):
            named[f"{prefix}{name}.weight"] = weight
    return {name: weight.detach() for name, weight in named.items()}


def count(shape: TransformerShape) -> int:
    """Return how many weights `views` gives, without a model."""
    feed_forward = 1 + OF_AN_EXPERT * shape.num_experts if shape.num_experts else OF_AN_EXPERT
    of_a_layer = OF_A_LAYER + feed_forward + 2 * (shape.qk_norm != "none")
    return OUTSIDE_LAYERS - shape.tie_embeddings + shape.num_layers * of_a_layer


def _attention(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the four matrices of attention, and the gains of its norms if it has any.

    Heads are rows one below another in both formats, and both turn channel i with i + P/2.
    """
    for name, weight in zip("qkv", torch.split(attention.qkv.weight, attention.widths), strict=True):
        yield f"self_attn.{name}_proj", weight
    yield "self_attn.o_proj", attention.out.weight
    for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
        if norm is not None:
            yield f"self_attn.{name}_norm", norm.weight


def _feed_forward(
    layer: MoELayer | FeedForward, prefix: str, gate: str, up: str, down: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and matrices of a feed-forward; `gate`, `up` and `down` are what its projections are called."""
    if isinstance(layer, FeedForward):
        yield f"{prefix}.{gate}", layer.w13_2FD[0]
        yield f"{prefix}.{up}", layer.w13_2FD[1]
        yield f"{prefix}.{down}", layer.w2_FD.T
        return
    yield f"{prefix}.gate", layer.router.weight_ED
    for expert, (w13_2FD, w2_FD) in enumerate(zip(layer.w13_E2FD, layer.w2_EFD, strict=True)):
        yield f"{prefix}.experts.{expert}.{gate}", w13_2FD[0]
        yield f"{prefix}.experts.{expert}.{up}", w13_2FD[1]
        yield f"{prefix}.experts.{expert}.{down}", w2_FD.T

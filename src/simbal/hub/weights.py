"""The names of a Transformer's weights in Hugging Face's format: Mixtral's if sparse, Llama's if dense.

Each name has a view of our parameter, so that the same list writes a folder and reads one. These are the classic names,
with a matrix for each expert: transformers merges the experts when it reads them, and writes these names again.
Reference: transformers 5.23, models/mixtral, models/llama and conversion_mapping.py.
Shapes: V vocabulary, D model width, L layers, E experts, F hidden width of an expert or of the dense feed-forward.
"""

from collections.abc import Iterator

from torch import Tensor

from simbal.model.attention import Attention
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.transformer import Block, Transformer

OUTSIDE_LAYERS, OF_A_LAYER = 3, 6  # weights; a sparse layer has one more, and each feed-forward or expert three
OF_AN_EXPERT = 3


def views(model: Transformer) -> dict[str, Tensor]:
    """Return a view of every weight by its name on disk; what is copied into a view is copied into the model.

    Matrices are (out, in). A router whose weight is computed (`ortho_param`) gives what it computes now, into which
    nothing can be copied.
    """
    named = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head_VD,
    }
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{layer}."
        named |= {
            f"{prefix}input_layernorm.weight": block.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": block.feed_forward_norm.weight,
        }
        for name, weight in (*_attention(block.attention), *_feed_forward(block.feed_forward)):
            named[f"{prefix}{name}.weight"] = weight
    return {name: weight.detach() for name, weight in named.items()}


def count(num_layers: int, num_experts: int) -> int:
    """Return how many weights `views` gives, without a model."""
    feed_forward = 1 + OF_AN_EXPERT * num_experts if num_experts else OF_AN_EXPERT
    return OUTSIDE_LAYERS + num_layers * (OF_A_LAYER + feed_forward)


def _attention(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the four matrices of attention, (D, D) each.

    Heads are rows one below another in both formats, and both turn channel i with i + P/2.
    """
    for name, weight_DD in zip("qkv", attention.qkv.weight.chunk(3), strict=True):
        yield f"self_attn.{name}_proj", weight_DD
    yield "self_attn.o_proj", attention.out.weight


def _feed_forward(layer: MoELayer | FeedForward) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and matrices of a feed-forward; Mixtral's w1, w3 and w2 are gate, up and down projections."""
    if isinstance(layer, FeedForward):
        yield "mlp.gate_proj", layer.w13_2FD[0]
        yield "mlp.up_proj", layer.w13_2FD[1]
        yield "mlp.down_proj", layer.w2_FD.T
        return
    yield "block_sparse_moe.gate", layer.router.weight_ED
    for expert, (w13_2FD, w2_FD) in enumerate(zip(layer.w13_E2FD, layer.w2_EFD, strict=True)):
        prefix = f"block_sparse_moe.experts.{expert}."
        yield f"{prefix}w1", w13_2FD[0]
        yield f"{prefix}w3", w13_2FD[1]
        yield f"{prefix}w2", w2_FD.T

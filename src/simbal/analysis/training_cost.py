"""Parameters by part, and the arithmetic of training with them, in whole numbers.

References: 6 N T, arXiv 2001.08361 (N as in arXiv 2506.14038: active parameters less the input embedding).
Shapes: V vocabulary, D model width, L layers, E experts, K experts per token, F hidden width, S sequence length.
"""

from dataclasses import dataclass

import torch
from torch import nn

from simbal.model.attention import Attention
from simbal.model.parameters import count_parameters
from simbal.model.transformer import Transformer, TransformerShape


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model, by part."""

    shape: TransformerShape
    embedding: int  # V D
    head: int  # V D, not tied to the embedding
    attention: int  # 4 D^2 L
    ffn: int  # 3 D F L, times E of a mixture
    ffn_active: int  # 3 D F L, times K of a mixture
    router: int  # D E L
    norms: int  # (2 L + 1) D

    @property
    def total(self) -> int:
        """Every parameter."""
        return self.embedding + self.head + self.attention + self.ffn + self.router + self.norms

    @property
    def active(self) -> int:
        """Those that one token passes through."""
        return self.total - self.ffn + self.ffn_active

    @property
    def without_embedding(self) -> int:
        """N of 6 N T: active, less the input embedding, which is looked up and not multiplied."""
        return self.active - self.embedding

    @property
    def matrices(self) -> int:
        """M: active parameters that a token's vector is multiplied by."""
        return self.without_embedding - self.norms

    @property
    def every_expert(self) -> float:
        """How many times N a pass through all E experts needs, as the similarity of experts (PES) does."""
        return (self.total - self.embedding) / self.without_embedding

    def total_with_biases(self, attention: bool) -> int:
        """With a bias for each output of an expert's three matrices, and of attention's four.

        The models here have none. The paper prints 627M for MoE-M, which is true with biases alone.
        """
        shape = self.shape
        experts = shape.num_layers * max(1, shape.num_experts) * (2 * shape.d_expert + shape.d_model)
        return self.total + experts + (4 * shape.d_model * shape.num_layers if attention else 0)

    def forward_flops(self, seq_len: int) -> int:
        """Per token: 2 M + 2 L D (S + 1).

        The products q k^T and p v take 4 D for each position seen, and a token sees (S + 1) / 2 on average.
        """
        return 2 * self.matrices + 2 * self.shape.num_layers * self.shape.d_model * (seq_len + 1)

    def training_flops(self, seq_len: int, tokens: int) -> int:
        """Three times forward: the backward pass multiplies for the inputs and for the weights."""
        return 3 * self.forward_flops(seq_len) * tokens

    def estimated_flops(self, tokens: int) -> int:
        """6 N T."""
        return 6 * self.without_embedding * tokens


def _attentions(model: Transformer) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def parameters(shape: TransformerShape) -> Parameters:
    """Count the parameters of the model itself, built without storage."""
    with torch.device("meta"):
        model = Transformer(shape)
    counts = count_parameters(model)
    parts = Parameters(
        shape,
        embedding=counts["embedding"],
        head=model.head_VD.numel(),
        attention=sum(layer.qkv.weight.numel() + layer.out.weight.numel() for layer in _attentions(model)),
        ffn=counts["experts"],
        ffn_active=counts["active"] - counts["total"] + counts["experts"],
        router=counts["router"],
        norms=sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.RMSNorm)),
    )
    assert (parts.total, parts.active) == (counts["total"], counts["active"]), "a part of the model is not counted"
    return parts

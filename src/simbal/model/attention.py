"""Causal multi-head attention with rotary position embeddings, the mask of documents, and the cache for generation.

Reference: RoFormer (arXiv 2104.09864), in the half-split layout of GPT-NeoX and Llama.
Shapes: B batch, S sequence, Q new tokens, D model width, H heads, P head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simbal.model.matmul import linear


class Attention(nn.Module):
    """A layer of multi-head attention, softmax(q k^T / sqrt(P)) v over the past, without biases and without QK-norm."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        rotation_2SP: Tensor,
        visible_B1SS: Tensor | None = None,
        past: "LayerPast | None" = None,
    ) -> Tensor:
        """Return the attention's output, in the shape of `x_BSD`.

        Args:
            x_BSD: hidden states; with `past`, those of the new tokens alone.
            rotation_2SP: from `rotary_angles`.
            visible_B1SS: from `document_mask`, or from `KeyValueCache.visible` with `past`; None: the whole past.
            past: keys and values of the tokens before, to which those of the new ones are added.
        """
        q_BHSP, k_BHSP, v_BHSP = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for part in linear(x_BSD, self.qkv.weight).chunk(3, -1)
        )
        q_BHSP, k_BHSP = rotate(q_BHSP, rotation_2SP), rotate(k_BHSP, rotation_2SP)
        if past is not None:
            k_BHSP, v_BHSP = past.extend(k_BHSP, v_BHSP)
        y_BHSP = F.scaled_dot_product_attention(q_BHSP, k_BHSP, v_BHSP, visible_B1SS, is_causal=visible_B1SS is None)
        return linear(y_BHSP.transpose(1, 2).flatten(-2), self.out.weight)


class LayerPast:
    """One layer's keys and values of the tokens before, in generation only."""

    def __init__(self) -> None:
        self.kv_2BHSP: Tensor | None = None

    def extend(self, k_BHSP: Tensor, v_BHSP: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values, and return all of them."""
        new_2BHSP = torch.stack([k_BHSP, v_BHSP])
        self.kv_2BHSP = new_2BHSP if self.kv_2BHSP is None else torch.cat([self.kv_2BHSP, new_2BHSP], 3)
        return self.kv_2BHSP[0], self.kv_2BHSP[1]


class KeyValueCache:
    """The tokens so far, and each layer's keys (already rotated) and values; it grows with every forward pass."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerPast() for _ in range(num_layers)]
        self.tokens_BS: Tensor | None = None

    def append(self, tokens_BQ: Tensor) -> Tensor:
        """Append the new tokens, and return all of them, (B, S)."""
        self.tokens_BS = tokens_BQ if self.tokens_BS is None else torch.cat([self.tokens_BS, tokens_BQ], 1)
        return self.tokens_BS

    def visible(self, num_new: int, document_end: int | None) -> Tensor:
        """Return the mask (B or 1, 1, Q, S): which tokens each of the `num_new` last ones sees, as without a cache."""
        assert self.tokens_BS is not None, "append comes first"
        if document_end is not None:
            return document_mask(self.tokens_BS, document_end)[:, :, -num_new:]
        length = self.tokens_BS.shape[1]
        seen_QS = torch.ones(num_new, length, dtype=torch.bool, device=self.tokens_BS.device)
        return seen_QS.tril(length - num_new)[None, None]


def document_mask(tokens_BS: Tensor, document_end: int) -> Tensor:
    """Return the mask (B, 1, S, S): s sees t <= s of its own document, which ends with the token `document_end`."""
    ends_BS = tokens_BS == document_end
    document_BS = ends_BS.cumsum(1) - ends_BS.long()  # the end belongs to the document that it ends
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril()[:, None]


def rotary_angles(seq_len: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin, (2, S, P), of position s times theta^(-2i/P); pair i stands at channels i and i + P/2."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
    """Turn each channel pair by its angle, in fp32."""
    cos_SP, sin_SP = rotation_2SP
    first, second = x_BHSP.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rotated_BHSP: Tensor = x_BHSP * cos_SP + turned * sin_SP
    return rotated_BHSP.to(x_BHSP.dtype)

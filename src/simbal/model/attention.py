"""Causal multi-head attention with rotary position embeddings.

Reference: RoFormer (arXiv 2104.09864), in the half-split layout of GPT-NeoX and Llama.
Shapes: B batch, S sequence, D model width, H heads, P head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simbal.matmul import linear


class Attention(nn.Module):
    """softmax(q k^T / sqrt(P)) v over the past, without biases and without QK-norm."""

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
        """`rotation_2SP` comes from `rotary_angles`, `visible_B1SS` from `document_mask`; without: the whole past.

        With `past`, `x_BSD` are the new tokens alone, and `visible_B1SS` says what they see of it and of themselves.
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
    """Keys and values of the tokens before, in generation only."""

    def __init__(self) -> None:
        self.kv_2BHSP: Tensor | None = None

    def extend(self, k_BHSP: Tensor, v_BHSP: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values up to the end of the new ones."""
        new_2BHSP = torch.stack([k_BHSP, v_BHSP])
        self.kv_2BHSP = new_2BHSP if self.kv_2BHSP is None else torch.cat([self.kv_2BHSP, new_2BHSP], 3)
        return self.kv_2BHSP[0], self.kv_2BHSP[1]


def document_mask(tokens_BS: Tensor, document_end: int) -> Tensor:
    """(B, 1, S, S) bool: position s sees t <= s of its own document, which ends with the token `document_end`."""
    ends_BS = tokens_BS == document_end
    document_BS = ends_BS.cumsum(1) - ends_BS.long()  # the end belongs to the document that it ends
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril()[:, None]


def rotary_angles(seq_len: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin (2, S, P) of position s times theta^(-2i/P), each pair i standing at channels i and i + P/2."""
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

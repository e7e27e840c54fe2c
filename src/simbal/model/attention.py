"""Causal multi-head attention with rotary position embeddings, document masks, and a key-value cache for generation.

Reference: grouped-query attention: Ainslie et al. 2023 (arXiv 2305.13245); QK-norm as in Qwen3 (arXiv 2505.09388) and
OLMoE (arXiv 2409.02060); rotary embeddings: RoFormer (arXiv 2104.09864), in the half-split layout of GPT-NeoX and
Llama, where channels i and i + P/2 of a head form a pair.
Shapes: B batch, H heads, G key and value heads, S sequence, Q new tokens, C channels, P head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from simbal.model import native
from simbal.model.matmul import linear


class Attention(nn.Module):
    """Causal multi-head attention, softmax(scale q k^T) v, without biases; the scale is 1 / sqrt(P) by default.

    Query head h uses key and value head h // (H / G).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        qk_norm: str,
        norm_eps: float,
        kernels: str = "torch",
        scale: float | None = None,
    ) -> None:
        """Create the parameters; `qk_norm` is none, head (over each head's channels) or projection (over all heads).

        `kernels=native` uses the kernels in C where they can run: without norms, masks, a cache and a `scale`.
        """
        super().__init__()
        self.kernels, self.scale = kernels, scale
        self.head_width, self.queries_per_key = head_width, num_heads // num_kv_heads
        self.widths = [heads * head_width for heads in (num_heads, num_kv_heads, num_kv_heads)]  # of q, k and v
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.out = nn.Linear(self.widths[0], d_model, bias=False)
        self.q_norm, self.k_norm = (
            None if qk_norm == "none" else nn.RMSNorm(head_width if qk_norm == "head" else width, norm_eps)
            for width in self.widths[:2]
        )

    def forward(
        self,
        x_BSD: Tensor,
        rotation_2SP: Tensor,
        visible_B1SS: Tensor | None = None,
        past: "LayerCache | None" = None,
    ) -> Tensor:
        """Return the output, in the shape of `x_BSD`.

        Args:
            x_BSD: hidden states; with `past`, only the new tokens.
            rotation_2SP: from `rotary_angles`.
            visible_B1SS: from `document_mask`, or with `past` from `KeyValueCache.visible`; None: all earlier tokens.
            past: keys and values of earlier tokens; the new tokens are appended to it.
        """
        qkv_BSQ, norms = linear(x_BSD, self.qkv.weight), (self.q_norm, self.k_norm, None)
        causal = visible_B1SS is None and past is None and self.q_norm is None and self.scale is None
        if self.kernels == "native" and causal and native.can_run(qkv_BSQ):
            num_heads = self.widths[0] // self.head_width
            y_BSD = native.attention(qkv_BSQ, rotation_2SP, num_heads, self.head_width)
            return linear(y_BSD, self.out.weight)
        q_BHSP, k_BGSP, v_BGSP = (
            _normalize(part, norm).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part, norm in zip(torch.split(qkv_BSQ, self.widths, -1), norms, strict=True)
        )
        q_BHSP, k_BGSP = rotate(q_BHSP, rotation_2SP), rotate(k_BGSP, rotation_2SP)
        if past is not None:
            k_BGSP, v_BGSP = past.extend(k_BGSP, v_BGSP)
        # not enable_gqa: torch may then fall back to a kernel that stores all attention weights, (B, H, S, S)
        k_BHSP, v_BHSP = (
            part if self.queries_per_key == 1 else part.repeat_interleave(self.queries_per_key, 1)
            for part in (k_BGSP, v_BGSP)
        )
        y_BHSP = F.scaled_dot_product_attention(
            q_BHSP, k_BHSP, v_BHSP, visible_B1SS, is_causal=visible_B1SS is None, scale=self.scale
        )
        return linear(y_BHSP.transpose(1, 2).flatten(-2), self.out.weight)


class LayerCache:
    """Keys and values of one layer for the tokens so far, for generation."""

    def __init__(self) -> None:
        self.kv_2BGSP: Tensor | None = None

    def extend(self, k_BGSP: Tensor, v_BGSP: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values and return all of them."""
        new_2BGSP = torch.stack([k_BGSP, v_BGSP])
        self.kv_2BGSP = new_2BGSP if self.kv_2BGSP is None else torch.cat([self.kv_2BGSP, new_2BGSP], 3)
        return self.kv_2BGSP[0], self.kv_2BGSP[1]


class KeyValueCache:
    """The tokens so far, and each layer's (rotated) keys and values. Every forward pass appends to them."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]
        self.tokens_BS: Tensor | None = None

    def append(self, tokens_BQ: Tensor) -> Tensor:
        """Append the new tokens and return all tokens, (B, S)."""
        self.tokens_BS = tokens_BQ if self.tokens_BS is None else torch.cat([self.tokens_BS, tokens_BQ], 1)
        return self.tokens_BS

    def visible(self, num_new: int, document_end: int | None) -> Tensor:
        """Return the mask, (B or 1, 1, Q, S), of the tokens that each of the last `num_new` tokens attends to."""
        assert self.tokens_BS is not None, "call append first"
        if document_end is not None:
            return document_mask(self.tokens_BS, document_end)[:, :, -num_new:]
        length = self.tokens_BS.shape[1]
        visible_QS = torch.ones(num_new, length, dtype=torch.bool, device=self.tokens_BS.device)
        return visible_QS.tril(length - num_new)[None, None]


def document_mask(tokens_BS: Tensor, document_end: int) -> Tensor:
    """Return the mask, (B, 1, S, S): a token attends to itself and earlier tokens of its document.

    `document_end` is the last token of each document.
    """
    ends_BS = tokens_BS == document_end
    document_BS = ends_BS.cumsum(1) - ends_BS.long()  # the end token belongs to the document before it
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril()[:, None]


def _normalize(x_BSC: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    """Apply `norm` in fp32 to each group of channels of the norm's width; return `x_BSC` unchanged without a norm."""
    if norm is None:
        return x_BSC
    width = norm.normalized_shape
    groups_BSGC = x_BSC.float().unflatten(-1, (-1, *width))
    return F.rms_norm(groups_BSGC, width, norm.weight.float(), norm.eps).flatten(-2).to(x_BSC.dtype)


def rotary_angles(seq_len: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin, (2, S, P), of the angles s * theta^(-2i/P) at position s."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
    """Rotate each channel pair by its angle, in fp32, with the cosines and sines of `rotary_angles`.

    On CUDA a Triton kernel is twenty times as fast as these operators. torch.compile fuses the operators itself.
    """
    if x_BHSP.is_cuda and not torch.compiler.is_compiling():
        return _Rotation.apply(x_BHSP, rotation_2SP)  # type: ignore[no-any-return, no-untyped-call]
    cos_SP, sin_SP = rotation_2SP
    first, second = x_BHSP.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rotated_BHSP: Tensor = x_BHSP * cos_SP + turned * sin_SP
    return rotated_BHSP.to(x_BHSP.dtype)


class _Rotation(torch.autograd.Function):
    """Autograd function of `rotate` on CUDA."""

    @staticmethod
    def forward(ctx: Any, x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
        from simbal.model.kernels import rotate_pairs

        ctx.save_for_backward(rotation_2SP)
        return rotate_pairs(x_BHSP, rotation_2SP, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHSP: Tensor) -> tuple[Tensor, None]:
        from simbal.model.kernels import rotate_pairs

        (rotation_2SP,) = ctx.saved_tensors
        return rotate_pairs(dy_BHSP, rotation_2SP, -1), None

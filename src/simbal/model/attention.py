"""Causal multi-head attention with rotary position embeddings, the mask of documents, and the cache for generation.

Reference: grouped queries: Ainslie et al. 2023 (arXiv 2305.13245); norms of queries and keys as in Qwen3 (arXiv
2505.09388) and OLMoE (arXiv 2409.02060); rotary positions: RoFormer (arXiv 2104.09864), in the half-split layout of
GPT-NeoX and Llama: pair i of a head's channels stands at i and i + P/2.
Shapes: B batch, H heads, S sequence, P head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from simbal.model.matmul import linear


class Attention(nn.Module):
    """A layer of multi-head attention, softmax(q k^T / sqrt(P)) v over the past, without biases.

    Head h of the queries reads head h // (H / G) of the keys and values.
    """

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int, head_width: int, qk_norm: str, norm_eps: float
    ) -> None:
        """Make the matrices and gains; `qk_norm` is none, head (each head's P channels) or projection (all of them)."""
        super().__init__()
        self.head_width, self.queries_of_a_key = head_width, num_heads // num_kv_heads
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
        past: "LayerPast | None" = None,
    ) -> Tensor:
        """Return the attention's output, in the shape of `x_BSD`.

        Args:
            x_BSD: hidden states; with `past`, those of the new tokens alone.
            rotation_2SP: from `rotary_angles`.
            visible_B1SS: from `document_mask`, or from `KeyValueCache.visible` with `past`; None: the whole past.
            past: keys and values of the tokens before, to which those of the new ones are added.
        """
        norms = (self.q_norm, self.k_norm, None)
        q_BHSP, k_BGSP, v_BGSP = (
            normalised(part, norm).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part, norm in zip(torch.split(linear(x_BSD, self.qkv.weight), self.widths, -1), norms, strict=True)
        )
        q_BHSP, k_BGSP = rotate(q_BHSP, rotation_2SP), rotate(k_BGSP, rotation_2SP)
        if past is not None:
            k_BGSP, v_BGSP = past.extend(k_BGSP, v_BGSP)
        # torch's own grouping would leave some kernels for one that keeps all weights (B, H, S, S)
        k_BHSP, v_BHSP = (
            part if self.queries_of_a_key == 1 else part.repeat_interleave(self.queries_of_a_key, 1)
            for part in (k_BGSP, v_BGSP)
        )
        y_BHSP = F.scaled_dot_product_attention(q_BHSP, k_BHSP, v_BHSP, visible_B1SS, is_causal=visible_B1SS is None)
        return linear(y_BHSP.transpose(1, 2).flatten(-2), self.out.weight)


class LayerPast:
    """One layer's keys and values of the tokens before, in generation only."""

    def __init__(self) -> None:
        self.kv_2BGSP: Tensor | None = None

    def extend(self, k_BGSP: Tensor, v_BGSP: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values, and return all of them."""
        new_2BGSP = torch.stack([k_BGSP, v_BGSP])
        self.kv_2BGSP = new_2BGSP if self.kv_2BGSP is None else torch.cat([self.kv_2BGSP, new_2BGSP], 3)
        return self.kv_2BGSP[0], self.kv_2BGSP[1]


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


def normalised(x_BSC: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    """Return `x_BSC` with each group of as many channels as `norm` has gains divided by its root mean square, in fp32.

    Without a norm it is returned as it is.
    """
    if norm is None:
        return x_BSC
    width = norm.normalized_shape
    groups_BSGC = x_BSC.float().unflatten(-1, (-1, *width))
    return F.rms_norm(groups_BSGC, width, norm.weight.float(), norm.eps).flatten(-2).to(x_BSC.dtype)


def rotary_angles(seq_len: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin, (2, S, P), of position s times theta^(-2i/P)."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
    """Turn each channel pair by its angle, in fp32, with the cosines and sines of `rotary_angles`.

    On CUDA one kernel does it, in a twentieth of the operators' time; torch.compile makes one of its own of them.
    """
    if x_BHSP.is_cuda and not torch.compiler.is_compiling():
        return _Rotation.apply(x_BHSP, rotation_2SP)  # type: ignore[no-any-return, no-untyped-call]
    cos_SP, sin_SP = rotation_2SP
    first, second = x_BHSP.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rotated_BHSP: Tensor = x_BHSP * cos_SP + turned * sin_SP
    return rotated_BHSP.to(x_BHSP.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
        from simbal.model.rotary_kernels import turned

        ctx.save_for_backward(rotation_2SP)
        return turned(x_BHSP, rotation_2SP, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHSP: Tensor) -> tuple[Tensor, None]:
        from simbal.model.rotary_kernels import turned

        (rotation_2SP,) = ctx.saved_tensors
        return turned(dy_BHSP, rotation_2SP, -1), None

"""What attention has already computed of the tokens before, so that generating a token costs one token's work.

Shapes: B batch, Q new tokens, S tokens so far with the new ones, H heads, P head width.
"""

import torch
from torch import Tensor

from simbal.model.attention import LayerPast, document_mask


class KeyValueCache:
    """The tokens so far, and in each layer their keys (already rotated) and values; it grows with every forward."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerPast() for _ in range(num_layers)]
        self.tokens_BS: Tensor | None = None

    def append(self, tokens_BQ: Tensor) -> Tensor:
        """All tokens (B, S) up to the end of the new ones."""
        self.tokens_BS = tokens_BQ if self.tokens_BS is None else torch.cat([self.tokens_BS, tokens_BQ], 1)
        return self.tokens_BS

    def visible(self, num_new: int, document_end: int | None) -> Tensor:
        """(B or 1, 1, Q, S) bool: what each new token sees, as without a cache."""
        assert self.tokens_BS is not None, "append comes first"
        if document_end is not None:
            return document_mask(self.tokens_BS, document_end)[:, :, -num_new:]
        length = self.tokens_BS.shape[1]
        seen_QS = torch.ones(num_new, length, dtype=torch.bool, device=self.tokens_BS.device)
        return seen_QS.tril(length - num_new)[None, None]

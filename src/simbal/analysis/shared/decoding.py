"""Draws a run's next tokens with a cache of the past, under every strategy.

Shapes: B samples, S tokens so far, Q new tokens of a pass, N tokens, E experts, V ids.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from simbal.model.attention import KeyValueCache
from simbal.model.router import Candidates, Steering, SteeringAround
from simbal.model.transformer import Transformer


class WholePrefix(SteeringAround):
    """A `Steering` around another that sees what every token so far had, and chooses for the new ones.

    With this even a choice by a hash of the sequence so far is that of a forward pass over the whole sequence, as long
    as a later token cannot change an earlier one's experts, which in evaluation holds for every strategy.
    """

    def __init__(self, strategy: Steering, cache: KeyValueCache) -> None:
        """Wrap `strategy`; `cache` is that of the same forward passes, which knows the tokens."""
        self.strategy, self.cache = strategy, cache
        self._past: dict[int, Tensor] = {}  # (2, B, S, E) of each layer: logits and probabilities

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the last Q rows of each sequence's scores, (B*Q, E)."""
        num_sequences, new = candidates.tokens_BS.shape
        new_2NE = torch.stack([candidates.logits_NE, candidates.probs_NE])
        new_2BQE = new_2NE.view(2, num_sequences, new, -1)
        past_2BSE = self._past.get(candidates.layer)
        all_2BSE = new_2BQE if past_2BSE is None else torch.cat([past_2BSE, new_2BQE], 2)
        self._past[candidates.layer] = all_2BSE
        logits_NE, probs_NE = all_2BSE.flatten(1, 2)
        assert self.cache.tokens_BS is not None, "the model appends the tokens before it routes them"
        whole = Candidates(candidates.layer, self.cache.tokens_BS, logits_NE, probs_NE, candidates.top_k)
        scores_NE = self.strategy.choice_scores(whole)
        return scores_NE.reshape(num_sequences, -1, scores_NE.shape[1])[:, -new:].flatten(0, 1)


def decoder_of(model: Transformer, steering: Steering) -> Callable[[Tensor], Tensor]:
    """Return a function that is given the next ids (B, Q), and returns the logits (B, V) after the last of them."""
    cache = KeyValueCache(model.shape.num_layers)
    whole = WholePrefix(steering, cache)

    def logits(next_BQ: Tensor) -> Tensor:
        hidden_BQD, _ = model(next_BQ, whole, cache)
        logits_BV: Tensor = hidden_BQD[:, -1] @ model.head_VD.T
        return logits_BV

    return logits

"""Routers that see one token at a time choose as if they saw the whole sequence so far.

Shapes: B sequences, Q new tokens, S tokens so far with the new ones, E experts; N = B*Q or B*S.
"""

import torch
from torch import Tensor

from simbal.model.key_value_cache import KeyValueCache
from simbal.model.router import Candidates, Steering


class WholePrefix:
    """A `Steering` around another, which is shown what every token so far had, and asked for the new ones' experts.

    With this even a choice by a hash of the sequence so far is that of a forward pass over the whole sequence, as long
    as a later token cannot change an earlier one's experts, which in evaluation holds for every strategy.
    """

    def __init__(self, steering: Steering, cache: KeyValueCache) -> None:
        """`cache`: of the same forward passes; it knows the tokens."""
        self.steering, self.cache = steering, cache
        self._past: dict[int, Tensor] = {}  # (2, B, S, E) of each layer: logits and probabilities

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Each token's logits are adjusted alone."""
        return self.steering.adjust_logits(logits_NE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """The last Q rows of each sequence's scores."""
        num_sequences, new = candidates.tokens_BS.shape
        new_2NE = torch.stack([candidates.logits_NE, candidates.probs_NE])
        new_2BQE = new_2NE.view(2, num_sequences, new, -1)
        past_2BSE = self._past.get(candidates.layer)
        all_2BSE = new_2BQE if past_2BSE is None else torch.cat([past_2BSE, new_2BQE], 2)
        self._past[candidates.layer] = all_2BSE
        logits_NE, probs_NE = all_2BSE.flatten(1, 2)
        assert self.cache.tokens_BS is not None, "the model appends the tokens before it routes them"
        whole = Candidates(candidates.layer, self.cache.tokens_BS, logits_NE, probs_NE)
        scores_NE = self.steering.choice_scores(whole)
        return scores_NE.reshape(num_sequences, -1, scores_NE.shape[1])[:, -new:].flatten(0, 1)

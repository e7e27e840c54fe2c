"""Drawing the next token from a model's logits.

Reference: nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).
Shapes: B sequences, V vocabulary, T drawn tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from simbal.analysis.whole_prefix import WholePrefix
from simbal.model.key_value_cache import KeyValueCache
from simbal.model.router import Steering
from simbal.model.transformer import Transformer


@dataclass(frozen=True)
class Drawing:
    """How a token is drawn; `temperature` 0 takes the most probable one."""

    temperature: float
    top_p: float
    seed: int

    def uniform_numbers(self, samples: int, tokens: int) -> Tensor:
        """(B, T) in [0, 1): a sample is the same however many there are, and a shorter one is a longer one's start."""
        rows = [np.random.Generator(np.random.PCG64([self.seed, sample])).random(tokens) for sample in range(samples)]
        return torch.from_numpy(np.stack(rows))

    def draw(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """(B,) ids: the token at `uniform_B` of the probability mass that is kept, most probable tokens first.

        Kept are the fewest tokens whose probabilities, at this temperature, sum to at least `top_p`.
        """
        if self.temperature == 0:
            return logits_BV.argmax(1)
        # less its largest value first: a tiny temperature must not make infinities of it
        shifted_BV = logits_BV.double() - logits_BV.amax(1, keepdim=True)
        probs_BV, ids_BV = (shifted_BV / self.temperature).softmax(1).sort(dim=1, descending=True, stable=True)
        reached_BV = probs_BV.cumsum(1)
        before_BV = reached_BV - probs_BV
        kept_BV = (before_BV < self.top_p).double() * probs_BV
        place_BV = kept_BV.cumsum(1)
        target_B1 = uniform_B[:, None] * place_BV[:, -1:]
        place_B1 = torch.searchsorted(place_BV, target_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
        return ids_BV.gather(1, place_B1)[:, 0]


@torch.inference_mode()
def continue_tokens(
    model: Transformer, steering: Steering, prompt_BS: Tensor, tokens: int, drawing: Drawing, possible_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids (B, T) after the prompts, drawn one by one with a cache, and each one's -log p in nats at temperature 1.

    `possible_V` says which ids can be drawn; -log p is over these.
    """
    cache = KeyValueCache(model.shape.num_layers)
    steering = WholePrefix(steering, cache)
    uniform_BT = drawing.uniform_numbers(len(prompt_BS), tokens)
    ids, nlls, next_BQ = [], [], prompt_BS
    for step in range(tokens):
        hidden_BQD, _ = model(next_BQ, steering, cache)
        logits_BV = (hidden_BQD[:, -1] @ model.head_VD.T).float().cpu().masked_fill(~possible_V, -torch.inf)
        ids_B = drawing.draw(logits_BV, uniform_BT[:, step])
        nlls.append(-logits_BV.log_softmax(1).gather(1, ids_B[:, None])[:, 0])
        ids.append(ids_B)
        next_BQ = ids_B[:, None].to(prompt_BS.device)
    return torch.stack(ids, 1), torch.stack(nlls, 1)

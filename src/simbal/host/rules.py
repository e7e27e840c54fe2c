"""The rules by which routers of Hugging Face models turn logits into a choice of experts and their weights.

A rule is never believed by the name of a class: a router is run on random numbers, and that rule is taken which gives
the same numbers. Names of classes and keys of configs have changed their meaning between versions of transformers.

Reference: bias on the choice, arXiv 2408.15664.
Shapes: N tokens, E experts, K experts per token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Self

import torch
from torch import Tensor, nn

from simbal.model.router import Groups, gate, largest, topk_weights

SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # attributes of routers
GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))


@dataclass(frozen=True)
class Rule:
    """The rule of most routers: p = gating(logits); the K largest of p + bias; weights p, scaled.

    Where a model has groups, only the experts of the best of them can be chosen. A subclass for another kind of router
    overrides `candidates`, `scores` and `weights`, and is added to `RULES`.
    """

    gating: str  # softmax | sigmoid
    renormalize: bool  # the weights of the K are divided by their sum
    scale: float = 1.0  # of the weights, at last
    groups: Groups | None = None
    biased: bool = False  # a bias is added to p for the choice alone

    @property
    def plain(self) -> bool:
        """Whether the experts of the K largest logits are chosen, so that a strategy may choose in their place."""
        return self.groups is None and not self.biased

    @property
    def draws_in_training(self) -> bool:
        """Whether the router draws experts at random in training, which no steering can do in its place."""
        return False

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        """Yield the rules that a router may follow, by its attributes; the first that it does follow is taken.

        Args:
            module: the router.
            biased: there is a bias for its choice.
        """
        given = (getattr(module, name, None) for name in SCALES)
        scales = [1.0, *(float(scale) for scale in given if isinstance(scale, int | float))]
        groups: list[Groups | None] = [None]
        for count, chosen in ((getattr(module, c, None), getattr(module, k, None)) for c, k in GROUPS):
            if isinstance(count, int) and isinstance(chosen, int) and count > 1:
                groups += [Groups(count, chosen, "best"), Groups(count, chosen, "best two")]
        kinds = product(("softmax", "sigmoid"), (True, False), dict.fromkeys(scales), groups, {biased, False})
        for gating, renormalize, scale, group, on_choice in kinds:
            yield cls(gating, renormalize, scale, group, on_choice)

    def scores(self, probs_NE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return the scores by whose K largest experts are chosen, (N, E)."""
        scores_NE = probs_NE if bias_E is None else probs_NE + bias_E
        return scores_NE if self.groups is None else self.groups.limited(scores_NE)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the weights of the chosen experts' outputs, (N, K)."""
        return self.scale * topk_weights(logits_NE, probs_NE, experts_NK, self.gating, self.renormalize)

    def decide(self, logits_NE: Tensor, top_k: int, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, (N, K) each."""
        probs_NE = gate(logits_NE, self.gating)
        experts_NK = largest(self.scores(probs_NE, bias_E), top_k)
        return experts_NK, self.weights(logits_NE, probs_NE, experts_NK)


@dataclass(frozen=True)
class SparseMixer(Rule):
    """The rule of Phi-3.5-MoE in evaluation: the two largest logits, one after the other.

    The weight of each is its softmax over those logits that come close to the largest that is left:
    (largest - logit) / max(|logit|, largest) <= 2 jitter. In training the router draws experts, and weighs by another
    gradient than that of the softmax. Reference: arXiv 2310.00811; as in transformers.
    """

    jitter: float = 0.01

    @property
    def plain(self) -> bool:
        """False: no choice of another can be weighed by its rule."""
        return False

    @property
    def draws_in_training(self) -> bool:
        """True."""
        return True

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        """Yield the rule for a router that has this jitter."""
        jitter = getattr(module, "router_jitter_noise", None)
        if isinstance(jitter, float) and not biased:
            yield cls("softmax", renormalize=False, jitter=jitter)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the weights of the chosen experts' outputs, (N, K)."""
        left_NE, weights = logits_NE, []
        for expert_N1 in torch.split(experts_NK, 1, dim=1):
            largest_N1 = left_NE.amax(1, keepdim=True)
            far_NE = (largest_N1 - logits_NE) / logits_NE.abs().clamp(min=largest_N1) > 2 * self.jitter
            weights.append(left_NE.masked_fill(far_NE, -math.inf).softmax(1).gather(1, expert_N1))
            left_NE = left_NE.scatter(1, expert_N1, -math.inf)
        return torch.cat(weights, 1)


RULES: list[type[Rule]] = [Rule, SparseMixer]

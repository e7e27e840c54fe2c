"""Choices by a threshold of each expert: a quantile of the scores, its best tokens, or a capacity.

Reference: BIP-based balancing (arXiv 2502.15451), one round of its dual update per step, not clipped at 0, averaged
over a step and smoothed over steps, which is ours; expert threshold: arXiv 2603.11535, without its warm-up by expert
choice, which looks ahead, and without its shared expert; dynamic quantile: J. Su, kexue.fm 11626, of which the
derivation alone has been read, from one step to the next, and smoothed, which is ours; expert choice: arXiv 2202.09368;
capacity: arXiv 2101.03961, as in flaxformer's routers that let tokens choose.
Shapes: N tokens, L MoE layers, E experts, K experts per token (on average, where it varies), R = N*K choices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties, require_unchosen
from simbal.balancing.bias import layer_bias
from simbal.config.values import not_negative, share
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing, largest


class QuantileBalancing(Balancing):
    """choice = top K of s - b; alpha_t = (K+1)-th largest of s_t - b; b_i' = (NK/E + 1)-th largest of s_ti - alpha_t.

    alpha_t is the score that a token's experts beat, b_i the surplus that only NK/E tokens have for expert i. After a
    step b becomes smoothing * b + (1 - smoothing) * mean of b' over its micro-batches and ranks, less its own mean.
    """

    formula = (
        "no loss; choice by s - b, alpha_t = (K+1)-th largest of s_t - b, "
        "b_i = (NK/E + 1)-th largest of s_ti - alpha_t, smoothed over steps, centred"
    )
    citation = "arXiv 2502.15451"
    properties = Properties(differentiable=False, scope="micro", causal=True, revives_dead_experts=True)

    def __init__(self, num_layers: int = 0, num_experts: int = 0, smoothing: float = 0.9) -> None:
        """Set the share of the old bias that stays, `smoothing` in [0, 1); the sizes are as in `LossFree`."""
        super().__init__()
        self.smoothing = share("smoothing", smoothing)
        self.bias_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Make the bias, one number for each layer and expert.

        Raises:
            UserError: every expert is chosen, or the bias was made for another model.
        """
        require_unchosen(routers)
        self.bias_LE = layer_bias(self.bias_LE, routers)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return gated scores less the layer's bias, (N, E)."""
        return candidates.probs_NE - self.bias_LE[candidates.layer]

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the bias that would balance these tokens, (L, E)."""
        return torch.stack(
            [
                surplus(routing.probs_NE.detach(), bias_E, routing.top_k)
                for routing, bias_E in zip(routings, self.bias_LE, strict=True)
            ]
        )

    def update(self, step: FinishedStep) -> None:
        """Move the bias towards the centred mean over the micro-batches."""
        mean_LE = step.measured_LE / step.num_measured
        centred_LE = mean_LE - mean_LE.mean(1, keepdim=True)
        self.bias_LE.lerp_(centred_LE.to(self.bias_LE.dtype), 1 - self.smoothing)


def surplus(scores_NE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return b_i = (NK/E + 1)-th largest over tokens of s_ti - alpha_t, (E,); NK/E is rounded down.

    alpha_t is the (K+1)-th largest of s_t - b.
    """
    num_tokens, num_experts = scores_NE.shape
    alpha_N1 = (scores_NE - bias_E).topk(top_k + 1, dim=1).values[:, -1:]
    capacity = num_tokens * top_k // num_experts
    return (scores_NE - alpha_N1).topk(capacity + 1, dim=0).values[-1]


class ExpertThreshold(Balancing):
    """Token t uses expert i if z_ti >= c_i, with c_i the running mean of i's cutoffs; as many experts as that makes.

    The cutoff of a micro-batch is the NK/E-th largest logit of the expert in it. After step n, c moves towards the mean
    cutoff by (1 - decay) / (1 - decay^n) of the way: the exponential mean from 0, divided by the sum of its weights.
    Before the first step each token has its K largest.
    """

    formula = "no loss; t uses i if z_ti >= c_i, c_i: running mean over steps of the NK/E-th largest logit of i"
    citation = "arXiv 2603.11535"
    properties = Properties(differentiable=False, scope="micro", causal=True, revives_dead_experts=True)
    ragged = True

    def __init__(self, num_layers: int = 0, num_experts: int = 0, decay: float = 0.99) -> None:
        """Set the share of the old mean that stays, `decay` in [0, 1); the sizes are as in `LossFree`."""
        super().__init__()
        self.decay = share("decay", decay)
        self.threshold_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts))
        self.steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Make the thresholds, one number for each layer and expert.

        Raises:
            UserError: every expert is chosen, or the thresholds were made for another model.
        """
        require_unchosen(routers)
        self.threshold_LE = layer_bias(self.threshold_LE, routers)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), with -inf where they are below the threshold."""
        return self.reaching(candidates.logits_NE, candidates)

    def reaching(self, scores_NE: Tensor, candidates: Candidates) -> Tensor:
        """Return scores, (N, E), with -inf where they are below the threshold; before the first step all but K."""
        scores_NE = scores_NE.to(self.threshold_LE.dtype)  # rounded as the threshold is, which may be one of them
        own_N1 = scores_NE.topk(candidates.top_k).values[:, -1:]
        # no `if`, which would wait for the device
        threshold_NE = torch.where(self.steps > 0, self.threshold_LE[candidates.layer], own_N1)
        return scores_NE.masked_fill(scores_NE < threshold_NE, -torch.inf)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the cutoff of each expert, (L, E)."""
        return torch.stack([cutoff(routing.logits_NE.detach(), routing.top_k) for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Take the mean cutoff over micro-batches and ranks into the running mean."""
        self.steps.add_(1)
        weight = (1 - self.decay) / (1 - self.decay ** self.steps.double())  # in fp64 exactly 1 at first
        mean_LE = (step.measured_LE / step.num_measured).to(self.threshold_LE.dtype)
        self.threshold_LE.lerp_(mean_LE, weight.to(mean_LE.dtype))


def cutoff(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return the NK/E-th largest logit of each expert over the tokens, (E,); NK/E is rounded down, and at least 1."""
    num_tokens, num_experts = logits_NE.shape
    return logits_NE.topk(max(1, num_tokens * top_k // num_experts), dim=0).values[-1]


class DynamicQuantile(ExpertThreshold):
    """Token t uses expert i if s_ti > beta_i, beta_i = (NK/E + 1)-th largest s_ti over t, s being the gated scores.

    After step n, beta moves towards the mean of these over micro-batches and ranks by the share (1 - smoothing) /
    (1 - smoothing^n) of the way. Before the first step each token has its K largest. It is `ExpertThreshold` with
    another cutoff.
    """

    formula = "no loss; t uses i if s_ti > beta_i, beta_i: running mean over steps of the (NK/E + 1)-th largest s_ti"
    citation = "kexue.fm 11626"

    def __init__(self, num_layers: int = 0, num_experts: int = 0, smoothing: float = 0.9) -> None:
        """Set the share of the old mean that stays, `smoothing` in [0, 1); the sizes are as in `LossFree`."""
        super().__init__(num_layers, num_experts, share("smoothing", smoothing))

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the gated scores, (N, E), with -inf where they are not above beta."""
        return self.reaching(candidates.probs_NE, candidates)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the smallest score above beta of each expert, (L, E)."""
        scores = [routing.probs_NE.detach().to(self.threshold_LE.dtype) for routing in routings]
        return torch.stack([smallest_above(scores_NE, routings[0].top_k) for scores_NE in scores])


def smallest_above(scores_NE: Tensor, top_k: int) -> Tensor:
    """Return the next number above the (NK/E + 1)-th largest score of each expert, (E,); NK/E is rounded down.

    To reach it is to exceed that score, in the dtype of `scores_NE`.
    """
    num_tokens, num_experts = scores_NE.shape
    beta_E = scores_NE.topk(num_tokens * top_k // num_experts + 1, dim=0).values[-1]
    return beta_E.nextafter(torch.full_like(beta_E, torch.inf))


class ExpertChoice(ExpertThreshold):
    """In training expert i takes the C = capacity_factor N K / E tokens with its largest p_ti, p after the gating.

    Not causal: whether a token is taken depends on those after it, which a model can learn to use. Evaluation cannot:
    there token t uses i if p_ti >= c_i, the running mean over steps of the smallest p_ti that i has taken, as
    `ExpertThreshold` has it; before the first step each token has its K most probable.
    """

    citation = "arXiv 2202.09368; evaluation: arXiv 2603.11535"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=True)

    def __init__(
        self, num_layers: int = 0, num_experts: int = 0, capacity_factor: float = 1.0, decay: float = 0.99
    ) -> None:
        """Set how many tokens an expert takes, and the `decay` of the mean; the sizes are as in `LossFree`."""
        super().__init__(num_layers, num_experts, decay)
        self.capacity_factor = checked_factor(capacity_factor)
        self.formula = (
            f"no loss; in training i takes its {capacity_factor:g} NK/E largest p_ti; in evaluation t uses i if "
            "p_ti >= c_i, c_i: running mean over steps of the smallest p_ti that i took"
        )

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the probabilities, (N, E), with -inf where the expert does not take the token."""
        probs_NE = candidates.probs_NE
        if not self.training:
            return self.reaching(probs_NE, candidates)
        taken_CE = best_tokens(probs_NE, candidates.top_k, self.capacity_factor)
        left_out = torch.full_like(probs_NE, -torch.inf)
        return left_out.scatter(0, taken_CE, probs_NE.gather(0, taken_CE))

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the smallest probability that each expert has taken, (L, E)."""
        smallest = []
        for routing in routings:
            probs_NE = routing.probs_NE.detach()
            last_1E = best_tokens(probs_NE, routing.top_k, self.capacity_factor)[-1:]
            smallest.append(probs_NE.gather(0, last_1E)[0])
        return torch.stack(smallest)


def best_tokens(scores_NE: Tensor, top_k: int, capacity_factor: float) -> Tensor:
    """Return the C tokens with each expert's largest scores, (C, E), the largest first; ties go to the first token.

    C is capacity_factor N K / E rounded down, but at least 1 and at most N.
    """
    capacity = max(1, math.floor(even_load(scores_NE, top_k, capacity_factor)))
    return scores_NE.sort(dim=0, descending=True, stable=True).indices[:capacity]


class Capacity(Balancing):
    """In training an expert takes at most C = ceil(capacity_factor N K / E) of a micro-batch's N tokens.

    The first choices of all tokens queue up for their experts, in the order of the tokens, and behind them all second
    choices, and so on; whoever stands behind place C is dropped. The weights of the experts that are left stay what
    they were. With K > 1 a first choice comes before a second one of an earlier token: not causal. In evaluation
    nothing is dropped, and the choice is that of a plain router.
    """

    citation = "arXiv 2101.03961"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=False)
    drops = True

    def __init__(self, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.capacity_factor = checked_factor(capacity_factor)
        self.formula = (
            f"no loss; in training an expert takes at most ceil({capacity_factor:g} NK/E) tokens of a micro-batch, all "
            "first choices before all second ones; weights as without drops"
        )

    @property
    def ragged(self) -> bool:
        """Whether experts may be dropped: in training."""
        return self.training

    def prepare(self, routers: Sequence[Router]) -> None:
        """Declare the choice causal where each token has one expert."""
        if all(router.top_k == 1 for router in routers):
            self.properties = replace(self.properties, causal=True)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), in training with -inf where an expert is not chosen or has dropped the token."""
        logits_NE = candidates.logits_NE
        if not self.training:
            return logits_NE
        experts_NK = largest(logits_NE, candidates.top_k)
        most = math.ceil(even_load(logits_NE, candidates.top_k, self.capacity_factor))
        kept_NK = places(experts_NK) < most
        kept_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter(1, experts_NK, kept_NK)
        return logits_NE.masked_fill(~kept_NE, -torch.inf)


def places(experts_NK: Tensor) -> Tensor:
    """Return how many choices stand before each in the queue of its expert, (N, K)."""
    queue_R = experts_NK.T.reshape(-1)  # all first choices, then all second ones
    sorted_R, order_R = queue_R.sort(stable=True)
    first_R = torch.searchsorted(sorted_R, sorted_R)  # where the row's expert begins
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(len(order_R), device=order_R.device) - first_R
    return places_R.view(experts_NK.shape[1], -1).T


def even_load(scores_NE: Tensor, top_k: int, capacity_factor: float) -> Fraction:
    """Return capacity_factor N K / E exactly, with the factor as it is written: 1.1 times 10 is not above 11."""
    num_tokens, num_experts = scores_NE.shape
    return Fraction(str(capacity_factor)) * num_tokens * top_k / num_experts


def checked_factor(value: Any) -> float:
    """Return a capacity factor; `UserError` unless it is a finite number above 0."""
    if not not_negative("capacity_factor", value):
        raise UserError(f"capacity_factor={value} must be above 0")
    return float(value)

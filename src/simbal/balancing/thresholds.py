"""Choice of experts by a threshold per expert: a quantile of the scores, the expert's best tokens, or a capacity.

Reference:
- Quantile balancing: BIP-based balancing (arXiv 2502.15451), one round of its dual update per step, not clipped at 0.
  The mean over a step and the smoothing over steps are our own. The histogram over a step is Kimi K3's (arXiv
  2607.24653), read in torchtitan, `QuantileBalancer`.
- Expert threshold: arXiv 2603.11535, without its warm-up by expert choice, which is not causal, and without its shared
  expert.
- Dynamic quantile: J. Su, kexue.fm 11626 (only the derivation). Using thresholds of earlier steps and smoothing them is
  our own.
- Expert choice: arXiv 2202.09368.
- Capacity: the order of drops from arXiv 2101.03961, as in flaxformer's token-choice routers; the capacity, which
  counts all K choices, from `get_capacity` in Megatron-LM's moe_utils.py.
Shapes: N tokens, L MoE layers, E experts, K experts per token (on average if it varies), R = N*K choices, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties, require_unused_experts
from simbal.balancing.bias import sized_for
from simbal.config.values import check_choice, check_fraction, check_integer, check_positive
from simbal.model.router import Candidates, Router, Routing, count_tokens, topk_indices

UP_TO_1 = ("softmax", "sigmoid")  # gatings with scores from 0 to 1


class QuantileBalancing(Balancing):
    """choice = top K of s - b; alpha_t = (K+1)-th largest of s_t - b; b_i' = (NK/E + 1)-th largest of s_ti - alpha_t.

    A token's chosen experts score above alpha_t, and only NK/E tokens exceed alpha_t by more than b_i at expert i.
    After a step, b = smoothing * b + (1 - smoothing) * b', where b' is averaged over micro-batches and ranks and
    centered.

    With estimator=histogram, b' is the quantile of all tokens of the step, interpolated in one of `bins` equal parts of
    [min b - 1, max b + 1]. It does not depend on the split into micro-batches.
    """

    properties = Properties(differentiable=False, scope="micro", causal=True, revives_dead_experts=True)

    def __init__(
        self,
        num_layers: int = 0,
        num_experts: int = 0,
        smoothing: float = 0.9,
        estimator: str = "mean",
        bins: int = 1000,
    ) -> None:
        """Initialize b = 0.

        Args:
            num_layers: number of MoE layers; 0: set by `prepare`.
            num_experts: number of experts; 0: set by `prepare`.
            smoothing: fraction of the old bias that is kept, in [0, 1).
            estimator: mean (of each micro-batch's quantiles), or histogram (of the full step; scores from 0 to 1).
            bins: number of bins of the histogram.
        """
        super().__init__()
        self.smoothing, self.bins = check_fraction("smoothing", smoothing), check_integer("bins", bins, 1)
        self.histogram = check_choice("estimator", estimator, ("mean", "histogram")) == "histogram"
        self.citation = "arXiv 2607.24653, as in torchtitan" if self.histogram else "arXiv 2502.15451"
        tokens = f" over the step, from a histogram with {bins} bins" if self.histogram else ""
        self.formula = (
            "no loss; choice by s - b, alpha_t = (K+1)-th largest of s_t - b, "
            f"b_i = (NK/E + 1)-th largest of s_ti - alpha_t{tokens}, smoothed over steps, centered"
        )
        if self.histogram:
            self.properties, self.gatings = replace(type(self).properties, scope="global"), UP_TO_1
        self.bias_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=torch.float32))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Create the bias with one value per layer and expert.

        Raises:
            UserError: every expert is always chosen, or the bias was created for another model.
        """
        require_unused_experts(routers)
        self.bias_LE = sized_for(routers, self.bias_LE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return gated scores minus the layer's bias, (N, E)."""
        return candidates.probs_NE - self.bias_LE[candidates.layer]

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the bias that balances these tokens, (L, E), or their histograms and N K, (L, E, B + 1)."""
        pairs = zip(routings, self.bias_LE, strict=True)
        if self.histogram:
            return torch.stack([required_bias_counts(r, bias_E, self.bins) for r, bias_E in pairs])
        return torch.stack([balancing_bias(r.probs_NE.detach(), bias_E, r.top_k) for r, bias_E in pairs])

    def update(self, step: FinishedStep) -> None:
        """Move the bias toward the centered mean over micro-batches and ranks."""
        if self.histogram:
            mean_LE = histogram_bias(step.measured_LE, self.bias_LE)
        else:
            mean_LE = step.measured_LE / step.num_measured
        centered_LE = mean_LE - mean_LE.mean(1, keepdim=True)
        self.bias_LE.lerp_(centered_LE.to(self.bias_LE.dtype), 1 - self.smoothing)


def balancing_bias(scores_NE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return b_i = (NK/E + 1)-th largest over tokens of s_ti - alpha_t, (E,); NK/E is rounded down.

    alpha_t is the (K+1)-th largest of s_t - b.
    """
    num_tokens, num_experts = scores_NE.shape
    alpha_N1 = (scores_NE - bias_E).topk(top_k + 1, dim=1).values[:, -1:]
    capacity = num_tokens * top_k // num_experts
    return (scores_NE - alpha_N1).topk(capacity + 1, dim=0).values[-1]


def required_bias_counts(routing: Routing, bias_E: Tensor, num_bins: int) -> Tensor:
    """Return how many tokens have alpha_t - s_ti in each bin, (E, B), and N K in a last column."""
    scores_NE, num_experts = routing.probs_NE.detach(), len(bias_E)
    alpha_N1 = (scores_NE - bias_E).topk(routing.top_k + 1, dim=1).values[:, -1:]
    lower, width = bin_edges(bias_E, num_bins)
    bin_NE = ((alpha_N1 - scores_NE - lower) / width).floor().long().clamp(0, num_bins - 1)
    row_E = torch.arange(num_experts, device=bin_NE.device) * num_bins
    counts_EB = count_tokens(bin_NE + row_E, num_experts * num_bins).view(num_experts, num_bins)
    return F.pad(counts_EB, (0, 1), value=len(scores_NE) * routing.top_k)


def bin_edges(bias_E: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Return the lower end and the width of the bins of -b', which lies within 1 of the range of -b."""
    return -bias_E.amax(-1) - 1, (bias_E.amax(-1) - bias_E.amin(-1) + 2) / num_bins


def histogram_bias(counts_LEM: Tensor, bias_LE: Tensor) -> Tensor:
    """Return the bias, (L, E), above which NK/E tokens require it, from the counts in B bins and N K in a last column.

    It is interpolated within the first bin where the cumulative count reaches NK/E, rounded up.
    """
    counts_LEB = counts_LEM[..., :-1]
    target_LE1 = counts_LEM[..., -1:].double() / counts_LEB.shape[1]
    cumulative_LEB = counts_LEB.cumsum(-1)
    bin_LE1 = (cumulative_LEB < target_LE1.ceil()).sum(-1, keepdim=True)
    inside_LE1 = counts_LEB.gather(-1, bin_LE1)
    before_LE1 = cumulative_LEB.gather(-1, bin_LE1) - inside_LE1
    position_LE = (bin_LE1 + (target_LE1 - before_LE1) / inside_LE1)[..., 0]
    lower_L, width_L = bin_edges(bias_LE, counts_LEB.shape[2])
    return -(lower_L[:, None] + position_LE * width_L[:, None])


class ExpertThreshold(Balancing):
    """Token t uses every expert i with z_ti >= c_i, where c_i is the running mean of the cutoffs of i.

    The cutoff of a micro-batch is the NK/E-th largest logit of the expert. After step n, c moves toward the mean
    cutoff by the fraction (1 - decay) / (1 - decay^n): a bias-corrected exponential mean. Before the first step each
    token uses the experts with its K largest logits.
    """

    formula = "no loss; t uses i if z_ti >= c_i, c_i: running mean over steps of the NK/E-th largest logit of i"
    citation = "arXiv 2603.11535"
    properties = Properties(differentiable=False, scope="micro", causal=True, revives_dead_experts=True)
    ragged = True

    def __init__(self, num_layers: int = 0, num_experts: int = 0, decay: float = 0.99) -> None:
        """Set the fraction of the old mean that is kept, `decay` in [0, 1); see also `LossFree`."""
        super().__init__()
        self.decay = check_fraction("decay", decay)
        self.threshold_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=torch.float32))
        self.steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Create the thresholds with one value per layer and expert.

        Raises:
            UserError: every expert is always chosen, or the thresholds were created for another model.
        """
        require_unused_experts(routers)
        self.threshold_LE = sized_for(routers, self.threshold_LE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), with -inf below the threshold."""
        return self.reaching(candidates.logits_NE, candidates)

    def reaching(self, scores_NE: Tensor, candidates: Candidates) -> Tensor:
        """Return the scores, (N, E), with -inf below the threshold; the K largest are kept before the first step."""
        scores_NE = scores_NE.to(self.threshold_LE.dtype)  # same rounding as the threshold, which may equal a score
        kth_largest_N1 = scores_NE.topk(candidates.top_k).values[:, -1:]
        # `if` would synchronize with the GPU
        threshold_NE = torch.where(self.steps > 0, self.threshold_LE[candidates.layer], kth_largest_N1)
        return scores_NE.masked_fill(scores_NE < threshold_NE, -torch.inf)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the cutoff of each expert, (L, E)."""
        return torch.stack([cutoff(routing.logits_NE.detach(), routing.top_k) for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Update the running mean with the mean cutoff over micro-batches and ranks."""
        self.steps.add_(1)
        weight = (1 - self.decay) / (1 - self.decay ** self.steps.double())  # in fp64, exactly 1 at step 1
        mean_LE = (step.measured_LE / step.num_measured).to(self.threshold_LE.dtype)
        self.threshold_LE.lerp_(mean_LE, weight.to(mean_LE.dtype))


def cutoff(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return the NK/E-th largest logit of each expert, (E,); NK/E is rounded down and at least 1."""
    num_tokens, num_experts = logits_NE.shape
    return logits_NE.topk(max(1, num_tokens * top_k // num_experts), dim=0).values[-1]


class DynamicQuantile(ExpertThreshold):
    """Token t uses every expert i with s_ti > beta_i, the running mean of the (NK/E + 1)-th largest gated score of i.

    This is `ExpertThreshold` with a different cutoff: after step n, beta moves toward the mean over micro-batches and
    ranks by the fraction (1 - smoothing) / (1 - smoothing^n). Before the first step each token uses the experts with
    its K largest scores.
    """

    formula = "no loss; t uses i if s_ti > beta_i, beta_i: running mean over steps of the (NK/E + 1)-th largest s_ti"
    citation = "kexue.fm 11626"

    def __init__(self, num_layers: int = 0, num_experts: int = 0, smoothing: float = 0.9) -> None:
        """Set the fraction of the old mean that is kept, `smoothing` in [0, 1); see also `LossFree`."""
        super().__init__(num_layers, num_experts, check_fraction("smoothing", smoothing))

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the gated scores, (N, E), with -inf where they do not exceed beta."""
        return self.reaching(candidates.probs_NE, candidates)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return each expert's threshold for these tokens, (L, E)."""
        scores = [routing.probs_NE.detach().to(self.threshold_LE.dtype) for routing in routings]
        return torch.stack([smallest_above(scores_NE, routings[0].top_k) for scores_NE in scores])


def smallest_above(scores_NE: Tensor, top_k: int) -> Tensor:
    """Return the smallest number above the (NK/E + 1)-th largest score of each expert, (E,); NK/E is rounded down.

    In the dtype of `scores_NE`, `>=` this number is the same as `>` that score.
    """
    num_tokens, num_experts = scores_NE.shape
    beta_E = scores_NE.topk(num_tokens * top_k // num_experts + 1, dim=0).values[-1]
    return beta_E.nextafter(torch.full_like(beta_E, torch.inf))


class ExpertChoice(ExpertThreshold):
    """In training, expert i takes the C = capacity_factor N K / E tokens with its largest gated scores p_ti.

    Not causal in training: later tokens affect whether an expert takes a token, so the model can exploit future tokens.
    Evaluation is causal: token t uses every expert i with p_ti >= c_i, where c_i is the running mean over steps of the
    smallest p_ti that i took, as in `ExpertThreshold`.
    """

    citation = "arXiv 2202.09368; evaluation: arXiv 2603.11535"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=True)

    def __init__(
        self, num_layers: int = 0, num_experts: int = 0, capacity_factor: float = 1.0, decay: float = 0.99
    ) -> None:
        """Set the capacity of an expert and the `decay` of the mean; see also `LossFree`."""
        super().__init__(num_layers, num_experts, decay)
        self.capacity_factor = check_positive("capacity_factor", capacity_factor)
        self.formula = (
            f"no loss; in training i takes the tokens with its {capacity_factor:g} NK/E largest p_ti; in evaluation t "
            "uses i if p_ti >= c_i, c_i: running mean over steps of the smallest p_ti that i took"
        )

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the gated scores, (N, E), with -inf where the expert does not take the token."""
        probs_NE = candidates.probs_NE
        if not self.training:
            return self.reaching(probs_NE, candidates)
        taken_CE = best_tokens(probs_NE, candidates.top_k, self.capacity_factor)
        return torch.full_like(probs_NE, -torch.inf).scatter(0, taken_CE, probs_NE.gather(0, taken_CE))

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the smallest score among the tokens that each expert takes, (L, E)."""
        smallest = []
        for routing in routings:
            probs_NE = routing.probs_NE.detach()
            last_1E = best_tokens(probs_NE, routing.top_k, self.capacity_factor)[-1:]
            smallest.append(probs_NE.gather(0, last_1E)[0])
        return torch.stack(smallest)


def best_tokens(scores_NE: Tensor, top_k: int, capacity_factor: float) -> Tensor:
    """Return the C tokens with the largest scores of each expert, (C, E), largest first; ties go to the first token.

    C is capacity_factor N K / E, rounded down, at least 1 and at most N.
    """
    capacity = max(1, math.floor(even_load(scores_NE, top_k, capacity_factor)))
    return scores_NE.sort(dim=0, descending=True, stable=True).indices[:capacity]


class Capacity(Balancing):
    """In training, an expert takes at most C = ceil(capacity_factor N K / E) of a micro-batch's N tokens.

    The first choices of all tokens enter the queues of their experts in token order, followed by all second choices,
    and so on. Choices after position C are dropped. The remaining experts keep their weights. With K > 1 this is not
    causal: a token's first choice precedes the second choice of an earlier token. Evaluation drops nothing.
    """

    citation = "order of drops: arXiv 2101.03961; capacity: Megatron-LM, get_capacity in moe_utils.py"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=False)
    drops = True

    def __init__(self, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.capacity_factor = check_positive("capacity_factor", capacity_factor)
        self.formula = (
            f"no loss; in training an expert takes at most ceil({capacity_factor:g} NK/E) tokens of a micro-batch, "
            "first choices before second choices; drops do not change weights"
        )

    @property
    def ragged(self) -> bool:
        """Whether experts may be dropped: only in training."""
        return self.training

    def prepare(self, routers: Sequence[Router]) -> None:
        """Declare the choice causal if each token has one expert."""
        if all(router.top_k == 1 for router in routers):
            self.properties = replace(self.properties, causal=True)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E); in training, with -inf for experts that are dropped or not chosen."""
        logits_NE = candidates.logits_NE
        if not self.training:
            return logits_NE
        experts_NK = topk_indices(logits_NE, candidates.top_k)
        capacity = math.ceil(even_load(logits_NE, candidates.top_k, self.capacity_factor))
        kept_NK = queue_positions(experts_NK) < capacity
        kept_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter(1, experts_NK, kept_NK)
        return logits_NE.masked_fill(~kept_NE, -torch.inf)


def queue_positions(experts_NK: Tensor) -> Tensor:
    """Return the position of each choice in the queue of its expert, (N, K), from 0."""
    queue_R = experts_NK.T.reshape(-1)  # all first choices, then all second choices
    sorted_R, order_R = queue_R.sort(stable=True)
    first_R = torch.searchsorted(sorted_R, sorted_R)  # start of the queue of the row's expert
    positions_R = torch.empty_like(order_R)
    positions_R[order_R] = torch.arange(len(order_R), device=order_R.device) - first_R
    return positions_R.view(experts_NK.shape[1], -1).T


def even_load(scores_NE: Tensor, top_k: int, capacity_factor: float) -> Fraction:
    """Return capacity_factor N K / E exactly, reading the factor as a decimal: 1.1 * 10 is exactly 11."""
    num_tokens, num_experts = scores_NE.shape
    return Fraction(str(capacity_factor)) * num_tokens * top_k / num_experts

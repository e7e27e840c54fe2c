"""Strategies with one well-known mistake each, which the conformance suite must catch."""

from dataclasses import replace

import torch
from torch import nn

from simbal.balancing.base import Balancing, Properties
from simbal.balancing.bias import LossFree
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss
from simbal.balancing.thresholds import ExpertChoice, ExpertThreshold, cutoff
from simbal.balancing.weight_losses import SimBal
from simbal.conformance import SIZES


class Undeclared(Balancing):
    """Declares no properties."""

    formula, citation = "0", "nobody"


class DenseGates(LoadBalancingLoss):
    """Counts every expert with a probability above 0 as chosen: f = 1, so the loss is the constant E."""

    def loss(self, routing):
        f_E = (routing.probs_NE > 0).double().mean(0)
        return self.coef * len(f_E) * (f_E * routing.distribution_NE.mean(0)).sum()


class CoefficientTwice(LoadBalancingLoss):
    """Multiplies by the coefficient twice."""

    def loss(self, routing):
        return self.coef * super().loss(routing)


class ConcatenatedLayers(PooledLoadBalancingLoss):
    """Does not declare that it pools the layers."""

    properties = replace(PooledLoadBalancingLoss.properties, mixes_layers=False)


class SecretReader(SimBal):
    """Declares that it depends only on weights, but uses probabilities."""

    def loss(self, routing):
        return super().loss(routing) * routing.probs_NE.max()


class RunningGlobal(LoadBalancingLoss):
    """Declares scope=global, but uses the counts of one micro-batch."""

    def __init__(self):
        super().__init__(scope="global")

    def losses(self, routings, step_counts_LE):
        return super().losses(routings, self.measure(routings))


class FalseHope(LoadBalancingLoss):
    """Declares that gates which are 0 for an expert can revive it."""

    def __init__(self):
        super().__init__(gates="sparse_renorm")
        self.properties = replace(self.properties, revives_dead_experts=True)


class HiddenLoss(Balancing):
    """Has an undeclared loss, on which nothing trains."""

    formula, citation = "mean of the logits", "nobody"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def loss(self, routing):
        return routing.logits_NE.mean()


class GoodBias(LossFree):
    """A correct base class for the mistakes below."""

    def __init__(self):
        super().__init__(**SIZES, update_rate=0.1)


class CastBias(GoodBias):
    """Casts its bias with the model."""

    def _apply(self, fn, recurse=True):
        return nn.Module._apply(self, fn, recurse)


class ForgottenBias(GoodBias):
    """Does not save its bias."""

    def __init__(self):
        super().__init__()
        self.bias_LE = nn.Buffer(self.bias_LE.clone(), persistent=False)


class CountsInForward(GoodBias):
    """Counts in the forward pass: twice if activations are recomputed."""

    def __init__(self):
        super().__init__()
        self.counts_LE = nn.Buffer(torch.zeros_like(self.bias_LE))

    def choice_scores(self, candidates):
        chosen_NK = super().choice_scores(candidates).topk(2).indices
        self.counts_LE[candidates.layer] += torch.bincount(chosen_NK.flatten(), minlength=SIZES["num_experts"])
        return super().choice_scores(candidates)


class MovesInEvaluation(GoodBias):
    """Moves its bias in every forward pass, including validation."""

    def choice_scores(self, candidates):
        self.bias_LE[candidates.layer] += 0.1 * candidates.probs_NE.mean(0)
        return super().choice_scores(candidates)


class LastMicroBatchOnly(GoodBias):
    """Updates with the counts of the last micro-batch."""

    def measure(self, routings):
        self.last_LE = super().measure(routings)
        return self.last_LE

    def update(self, step):
        super().update(replace(step, measured_LE=self.last_LE))


class LooksAhead(GoodBias):
    """Chooses by a mean over the batch, which includes later tokens."""

    def choice_scores(self, candidates):
        return super().choice_scores(candidates) - 50 * candidates.probs_NE.mean(0)


class SharedBias(GoodBias):
    """Stores its bias in the class."""

    shared_LE = torch.zeros(*SIZES.values())

    def choice_scores(self, candidates):
        return candidates.logits_NE + self.shared_LE[candidates.layer]

    def update(self, step):
        super().update(step)
        SharedBias.shared_LE += self.bias_LE


class ExpertZeroFirst(GoodBias):
    """Prefers high indices."""

    def choice_scores(self, candidates):
        scores_NE = super().choice_scores(candidates)
        return scores_NE + torch.arange(scores_NE.shape[1], device=scores_NE.device)


class GoodThreshold(ExpertThreshold):
    """A correct, ragged base class for the mistakes below."""

    def __init__(self):
        super().__init__(**SIZES)


class OwnBatch(GoodThreshold):
    """Chooses by the cutoff of the current batch, which includes later tokens."""

    def choice_scores(self, candidates):
        logits_NE = candidates.logits_NE
        return logits_NE.masked_fill(logits_NE < cutoff(logits_NE, candidates.top_k), -torch.inf)


class ChoiceInEvaluation(ExpertChoice):
    """Lets experts choose among later tokens in evaluation too."""

    def __init__(self):
        super().__init__(**SIZES)

    def reaching(self, scores_NE, candidates):
        return scores_NE.masked_fill(scores_NE < cutoff(scores_NE, candidates.top_k), -torch.inf)


class KeepsStrangeWeights(GoodThreshold):
    """Declares that it only drops, so weights are not divided by the sum over the chosen experts."""

    drops = True

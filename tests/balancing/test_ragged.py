"""Ragged choices, which give a token any number of experts, and the thresholds of experts, on a worked example."""

from dataclasses import replace

import pytest
import torch

from simbal.analysis.pruning import Pruning, pruned
from simbal.balancing.base import FinishedStep
from simbal.balancing.thresholds import ExpertThreshold, cutoff
from simbal.errors import UserError
from simbal.model.moe import MoELayer
from simbal.model.router import Router, Routing, ragged_indices, count_tokens, topk_weights
from tests.balancing.ragged_example import IDS_BS, LOGITS_NE, candidates, sets


def routing(scores_NE, gating="softmax", renormalize=False) -> Routing:
    return Routing.of_logits(
        LOGITS_NE.clone().requires_grad_(), 2, torch.eye(4), gating=gating, renormalize=renormalize,
        choice_scores=lambda *_: scores_NE, ragged=True,
    )  # fmt: skip


EXCLUDED_NE = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
SCORES_NE = LOGITS_NE.masked_fill(EXCLUDED_NE, -torch.inf)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_token_has_all_experts_whose_score_is_not_minus_infinity_and_their_weights(gating, renormalize):
    ragged = routing(SCORES_NE, gating, renormalize)
    assert ragged.topk_experts_NK.tolist() == [[0, 2, 3, 4], [0, 2, 1, 3], [4, 4, 4, 4], [3, 4, 4, 4]]
    assert ragged.tokens_per_expert_E.tolist() == [2, 1, 2, 3]
    probs_NE = LOGITS_NE.softmax(-1) if gating == "softmax" else LOGITS_NE.sigmoid()
    chosen_NE = probs_NE * (-torch.inf < SCORES_NE)
    if renormalize:
        chosen_NE = (chosen_NE / chosen_NE.sum(1, keepdim=True)).nan_to_num()
    table_NE = torch.zeros(4, 5).scatter(1, ragged.topk_experts_NK, ragged.topk_probs_NK)
    torch.testing.assert_close(table_NE[:, :4], chosen_NE)
    assert not table_NE[:, 4].any()


def test_a_token_without_experts_has_weights_of_zero_and_a_gradient_of_zero():
    ragged = routing(SCORES_NE, renormalize=True)
    ragged.topk_probs_NK.square().sum().backward()
    gradient_NE = ragged.logits_NE.grad
    assert gradient_NE.isfinite().all()
    assert not gradient_NE[2].any()
    assert gradient_NE[0].any()


def test_full_rows_are_the_choice_of_k_to_the_bit():
    fixed = Routing.of_logits(LOGITS_NE, 2, torch.eye(4))
    own_N1 = LOGITS_NE.topk(2).values[:, -1:]
    table_NE = ragged_indices(LOGITS_NE.masked_fill(own_N1 > LOGITS_NE, -torch.inf))
    assert torch.equal(table_NE[:, :2], fixed.topk_experts_NK)
    weights_NE = topk_weights(LOGITS_NE, fixed.probs_NE, table_NE, "softmax", renormalize=True)
    assert torch.equal(weights_NE[:, :2], fixed.topk_probs_NK)
    assert torch.equal(count_tokens(table_NE, 4), fixed.tokens_per_expert_E)


def test_the_cutoffs_of_the_example_are_the_second_largest_logits_of_each_expert():
    assert cutoff(LOGITS_NE, 2).tolist() == pytest.approx([1.5, 0.9, 0.0, -0.6])
    assert cutoff(LOGITS_NE[:1], 1).tolist() == LOGITS_NE[0].tolist()  # less than one token for each expert


def finished(cutoff_E) -> FinishedStep:
    return FinishedStep(2 * torch.tensor([cutoff_E]), 2, [], 0.1, 1.0)  # the sum over two micro-batches


def test_thresholds_are_the_corrected_running_mean_of_the_cutoffs():
    strategy = ExpertThreshold(1, 4)
    assert sets(strategy.choice_scores(candidates())) == [{0, 1}, {0, 2}, {0, 1}, {0, 1}]  # the two largest
    strategy.update(finished([1.5, 0.9, 0.0, -0.6]))
    chosen = sets(strategy.choice_scores(candidates()))
    assert chosen == [{0, 1, 2}, {0, 2}, {3}, {1, 3}]
    strategy.update(finished([1.0, 1.1, 0.2, -0.4]))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([1.248744, 1.000503, 0.100503, -0.499497], abs=1e-6)
    token_NE = torch.tensor([[1.2, 1.05, -0.1, -0.5]])
    assert sets(strategy.choice_scores(candidates(token_NE))) == [{1}]
    assert sets(strategy.eval().choice_scores(candidates(token_NE))) == [{1}]


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_keeps_everything_or_less_than_nothing_is_refused(decay):
    with pytest.raises(UserError, match="decay=.* must be at least 0 and below 1"):
        ExpertThreshold(1, 4, decay)


def test_thresholds_need_an_expert_that_is_not_chosen():
    with pytest.raises(UserError, match="every expert is always chosen"):
        ExpertThreshold(1, 4).prepare([Router(4, 2, 2, "softmax", True, layer=0)])


class Decided(torch.nn.Module):
    """A router whose decisions are given."""

    def __init__(self, decided):
        super().__init__()
        self.decided, self.weight_ED = decided, torch.eye(4)

    def forward(self, *_):
        return self.decided


def layer_of(decided) -> tuple[MoELayer, torch.Tensor]:
    """A layer with that choice, and its input."""
    layer, generator = MoELayer(Decided(decided), 4, 3, "reference"), torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return layer, torch.randn(1, 4, 4, generator=generator)


def test_a_layer_adds_up_the_experts_of_a_token_whatever_stands_in_its_empty_slots():
    ragged = routing(SCORES_NE)
    empty_NE = ragged.topk_experts_NK == 4
    spoilt = replace(ragged, topk_probs_NK=ragged.topk_probs_NK.masked_fill(empty_NE, torch.nan))
    layer, x_BSD = layer_of(spoilt)
    y_BSD, _ = layer(x_BSD, IDS_BS)
    for token in range(4):
        expected_D = torch.zeros(4)
        for expert in {0, 1, 2, 3} - {i for i in range(4) if EXCLUDED_NE[token, i]}:
            gate_F, up_F = layer.w13_E2FD[expert] @ x_BSD[0, token]
            hidden_F = torch.nn.functional.silu(gate_F) * up_F
            expected_D += ragged.probs_NE[token, expert] * (layer.w2_EFD[expert].T @ hidden_F)
        torch.testing.assert_close(y_BSD[0, token], expected_D)
    y_BSD.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_pruning_nothing_of_a_ragged_choice_computes_and_counts_what_the_layer_does():
    layer, x_BSD = layer_of(routing(SCORES_NE))
    plain_BSD, _ = layer(x_BSD, IDS_BS)
    for threshold, kept in ((0.0, 8), (1.0, 3)):  # one token has no expert, and one a single one
        with torch.no_grad(), pruned([layer], Pruning(threshold, "relative", False, False)) as kept_L:
            pruned_BSD, _ = layer(x_BSD, IDS_BS)
        assert kept_L == [kept]
        assert torch.allclose(pruned_BSD, plain_BSD, atol=1e-6) == (threshold == 0)
        assert not pruned_BSD[0, 2].any()

"""Strategies that give a token any number of experts, on the four tokens of one worked example."""

import pytest
import torch

from simbal.balancing.base import FinishedStep
from simbal.balancing.expert_threshold import ExpertThreshold, cutoff
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing, admitted, count, topk_weights

LOGITS_NE = torch.tensor([[2.0, 1.0, 0.0, -1.0], [1.5, -0.5, 0.5, -2.0], [0.2, 0.8, -1.0, 0.1], [1.0, 0.9, -0.4, -0.6]])
IDS_BS = torch.zeros(1, 4, dtype=torch.int64)


def candidates(logits_NE=LOGITS_NE, top_k=2) -> Candidates:
    return Candidates(0, IDS_BS[:, : len(logits_NE)], logits_NE, logits_NE.softmax(-1), top_k)


def sets(scores_NE) -> list[set[int]]:
    """The experts of each token."""
    return [{i for i, score in enumerate(row) if score > -torch.inf} for row in scores_NE.tolist()]


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
    table_NE = admitted(LOGITS_NE.masked_fill(own_N1 > LOGITS_NE, -torch.inf))
    assert torch.equal(table_NE[:, :2], fixed.topk_experts_NK)
    weights_NE = topk_weights(LOGITS_NE, fixed.probs_NE, table_NE, "softmax", renormalize=True)
    assert torch.equal(weights_NE[:, :2], fixed.topk_probs_NK)
    assert torch.equal(count(table_NE, 4), fixed.tokens_per_expert_E)


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

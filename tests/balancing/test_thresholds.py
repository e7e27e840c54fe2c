"""Choices by threshold: quantile balancing, expert threshold, dynamic quantile, expert choice, capacity."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.composition import Composition
from simbal.balancing.controls import NoBalancing
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.thresholds import (
    Capacity,
    DynamicQuantile,
    ExpertChoice,
    ExpertThreshold,
    QuantileBalancing,
    balancing_bias,
    cutoff,
    even_load,
    histogram_bias,
    queue_positions,
    required_bias_counts,
    smallest_above,
)
from simbal.errors import UserError
from simbal.model.router import Router, Routing, topk_indices
from tests.balancing.example import (
    LARGEST_SOFTMAX,
    LOGITS_NE,
    PROBS_BSE,
    TWO_LARGEST,
    candidates,
    example,
    finished,
    finite_sets,
    routing_by,
)


def test_a_quantile_step_on_the_example_worked_out_by_hand():
    bias_E = balancing_bias(PROBS_BSE.flatten(0, 1), torch.zeros(4), top_k=2)
    assert bias_E.tolist() == pytest.approx([0.1, 0, 0, -0.1])
    strategy = QuantileBalancing(1, 4, smoothing=0.75)
    _, routing = example()
    strategy.update(finished(2 * strategy.measure([routing]), 2))  # the mean of two micro-batches
    assert strategy.bias_LE[0].tolist() == pytest.approx([0.025, 0, 0, -0.025], abs=1e-8)


def test_a_quantile_from_a_histogram_equals_the_example_of_kimi_k3_worked_out_by_hand():
    """Ten bins on [-1, 1]: NK/E = 2 tokens are reached in bins 3, 3, 5, 5 at fractions 0.5, 1, 0.5, 1."""
    strategy, routing = QuantileBalancing(1, 4, 0.0, "histogram", 10), routing_by(NoBalancing(), "sigmoid")
    measured_LEM = strategy.measure([routing])
    assert measured_LEM[0, :, :-1].sum(1).tolist() == [4] * 4
    strategy.update(finished(2 * measured_LEM, 2))  # two equal micro-batches
    assert strategy.bias_LE[0].tolist() == pytest.approx([0.25, 0.15, -0.15, -0.25])
    assert routing_by(strategy, "sigmoid").tokens_per_expert_E.tolist() == [2, 2, 2, 2]


@given(st.integers(0, 99), st.integers(1, 3))
def test_a_fine_histogram_finds_the_exact_quantiles_of_all_micro_batches(seed, top_k):
    rng = torch.Generator().manual_seed(seed)
    bias_E = 0.1 * torch.randn(4, generator=rng)
    parts = [Routing.of_logits(torch.randn(24, 4, generator=rng), top_k, torch.eye(4), 1, "sigmoid") for _ in range(2)]
    counts_EM = sum(required_bias_counts(part, bias_E, 100_000) for part in parts)
    scores_NE = torch.cat([part.probs_NE for part in parts])
    alpha_N1 = (scores_NE - bias_E).topk(top_k + 1, 1).values[:, -1:]
    exact_E = (scores_NE - alpha_N1).topk(12 * top_k, 0).values[-1]
    torch.testing.assert_close(histogram_bias(counts_EM[None], bias_E[None])[0].float(), exact_E, atol=1e-4, rtol=0)


def test_a_histogram_needs_scores_from_0_to_1():
    composition = Composition({"quantile": QuantileBalancing(estimator="histogram")}, {})
    with pytest.raises(UserError, match="router=sqrtsoftplus is not supported by QuantileBalancing: use softmax, sig"):
        composition.prepare([Router(8, 4, 2, "sqrtsoftplus", False, layer=0)])


def test_quantile_balancing_evens_a_skewed_load():
    logits_NE = torch.randn(600, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(2, -2, 8)
    scores_NE, bias_E = logits_NE.softmax(-1), torch.zeros(8)
    for _ in range(30):
        bias_E = balancing_bias(scores_NE, bias_E, top_k=2)
    before, after = (torch.bincount(s.topk(2).indices.flatten()).max() for s in (scores_NE, scores_NE - bias_E))
    assert before > 2 * 150
    assert after < 1.1 * 150


def test_thresholds_are_the_bias_corrected_running_mean_of_the_cutoffs():
    assert cutoff(LOGITS_NE, 2).tolist() == pytest.approx([1.5, 0.9, 0.0, -0.6])
    assert cutoff(LOGITS_NE[:1], 1).tolist() == LOGITS_NE[0].tolist()  # less than one token per expert
    strategy = ExpertThreshold(1, 4)
    assert finite_sets(strategy.choice_scores(candidates())) == TWO_LARGEST
    strategy.update(finished(2 * torch.tensor([[1.5, 0.9, 0.0, -0.6]]), 2))  # the sum over two micro-batches
    assert finite_sets(strategy.choice_scores(candidates())) == [{0, 1, 2}, {0, 2}, {3}, {1, 3}]
    strategy.update(finished([[1.0, 1.1, 0.2, -0.4]]))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([1.248744, 1.000503, 0.100503, -0.499497], abs=1e-6)
    token_NE = torch.tensor([[1.2, 1.05, -0.1, -0.5]])
    assert finite_sets(strategy.choice_scores(candidates(token_NE))) == [{1}]
    assert finite_sets(strategy.eval().choice_scores(candidates(token_NE))) == [{1}]


def test_dynamic_quantiles_are_the_bias_corrected_running_mean_of_strict_quantiles():
    betas_E = smallest_above(LOGITS_NE, 2)
    assert betas_E.tolist() == pytest.approx([1.0, 0.8, -0.4, -1.0])
    chosen = LOGITS_NE.masked_fill(betas_E > LOGITS_NE, -torch.inf)
    assert finite_sets(chosen) == [{0, 1, 2}, {0, 2}, {3}, {1, 3}]
    strategy = DynamicQuantile(1, 4, smoothing=0.5)
    strategy.update(finished(2 * torch.tensor([[0.4, 0.3, 0.2, 0.1]]), 2))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    strategy.update(finished([[0.1, 0.3, 0.2, 0.4]]))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([0.2, 0.3, 0.2, 0.3])  # one third and two thirds


def test_expert_choice_looks_ahead_in_training_and_not_in_evaluation():
    changed_NE = LOGITS_NE.clone()
    changed_NE[3, 0] = 3.0
    strategy = ExpertChoice(1, 4)
    assert finite_sets(strategy.choice_scores(candidates()))[0] == {0}
    assert finite_sets(strategy.choice_scores(candidates(changed_NE)))[0] == {1, 2, 3}
    assert finite_sets(strategy.eval().choice_scores(candidates())) == TWO_LARGEST  # before the first step
    strategy.update(finished(strategy.train().measure([routing_by(strategy)])))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([0.6439, 0.3845, 0.1048, 0.0858], abs=1e-4)
    strategy.eval()
    assert finite_sets(strategy.choice_scores(candidates())) == LARGEST_SOFTMAX
    assert finite_sets(strategy.choice_scores(candidates(changed_NE)))[:3] == LARGEST_SOFTMAX[:3]


def test_with_half_a_capacity_the_evaluation_threshold_is_the_largest_probability():
    strategy = ExpertChoice(1, 4, 0.5)
    strategy.update(finished(strategy.measure([routing_by(strategy)])))
    assert finite_sets(strategy.eval().choice_scores(candidates())) == [set(), {0, 2}, {1, 3}, set()]


@pytest.mark.parametrize(("factor", "each"), [(0.01, 1), (0.75, 1), (1.0, 2), (1.25, 2), (1.5, 3), (50.0, 4)])
def test_every_expert_takes_its_capacity_of_different_tokens(factor, each):
    assert routing_by(ExpertChoice(1, 4, factor)).tokens_per_expert_E.tolist() == [each] * 4


def test_capacity_drops_choices_and_keeps_the_weights_of_the_others():
    plain = Routing.of_logits(LOGITS_NE, 2, torch.eye(4))
    routing = routing_by(Capacity(1.0))
    assert routing.tokens_per_expert_E.tolist() == [2, 2, 1, 0]
    assert routing.topk_experts_NK.tolist() == [[0, 1, 4, 4], [0, 2, 4, 4], [1, 4, 4, 4], [4, 4, 4, 4]]
    assert torch.equal(routing.topk_probs_NK[:2, :2], plain.topk_probs_NK[:2])
    assert routing.topk_probs_NK[2].tolist() == [plain.topk_probs_NK[2, 0].item(), 0, 0, 0]
    assert not routing.topk_probs_NK[3].any()
    assert torch.equal(routing.unsteered_experts_NK, plain.topk_experts_NK)
    assert routing_by(Capacity(1.25)).tokens_per_expert_E.tolist() == [3, 3, 1, 0]


def test_the_load_balancing_loss_counts_choices_before_the_drops_unless_biased():
    plain, routing = Routing.of_logits(LOGITS_NE, 2, torch.eye(4)), routing_by(Capacity(1.0))
    assert LoadBalancingLoss().loss(routing).item() == LoadBalancingLoss().loss(plain).item()
    after = 4 * (torch.tensor([2, 2, 1, 0]) / 4 * plain.probs_NE.mean(0)).sum()
    assert LoadBalancingLoss(1.0, choice="biased").loss(routing).item() == pytest.approx(after.item())


def test_nothing_is_dropped_in_evaluation_or_with_enough_capacity():
    plain = Routing.of_logits(LOGITS_NE, 2, torch.eye(4))
    evaluated = routing_by(Capacity(1.0).eval())
    assert (evaluated.ragged, evaluated.steered) == (False, False)
    for routing in (evaluated, routing_by(Capacity(2.0))):
        assert torch.equal(routing.topk_experts_NK[:, :2], plain.topk_experts_NK)
        assert torch.equal(routing.topk_probs_NK[:, :2], plain.topk_probs_NK)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_queue_positions_equal_a_loop(num_tokens, num_experts, top_k, seed):
    top_k = min(top_k, num_experts)
    scores_NE = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    experts_NK = topk_indices(scores_NE, top_k)
    waiting, expected = [0] * num_experts, torch.zeros(num_tokens, top_k, dtype=torch.int64)
    for choice in range(top_k):
        for token in range(num_tokens):
            expert = experts_NK[token, choice]
            expected[token, choice] = waiting[expert]
            waiting[expert] += 1
    assert torch.equal(queue_positions(experts_NK), expected)


def test_a_later_first_choice_precedes_an_earlier_second_choice():
    logits_NE = torch.tensor([[2.0, 1.0, 0.0, 0.0], [2.0, 0.0, 1.0, 0.0], [0.0, 0.0, 2.0, 1.0], [0.0, 1.0, 2.0, 0.0]])
    assert finite_sets(Capacity(0.5).choice_scores(candidates(logits_NE))) == [{0, 1}, set(), {2, 3}, set()]
    logits_NE[3, 1] = 3.0  # now its first choice
    assert finite_sets(Capacity(0.5).choice_scores(candidates(logits_NE))) == [{0}, set(), {2, 3}, {1}]


@pytest.mark.parametrize(("top_k", "causal"), [(1, True), (2, False)])
def test_capacity_is_causal_with_one_expert_per_token(top_k, causal):
    strategy = Capacity()
    Composition({"capacity": strategy}, {}).prepare([Router(4, 4, top_k, "softmax", True, layer=0)])
    assert strategy.properties.causal == causal
    assert not Capacity.properties.causal


def test_a_capacity_is_exact_for_decimal_factors():
    assert math.ceil(even_load(torch.zeros(10, 4), 4, 1.1)) == 11
    assert math.floor(even_load(torch.zeros(100, 4), 4, 0.29)) == 29

"""Expert choice, top-p, dynamic quantiles and capacity: what the worked example and simple properties say of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.base import FinishedStep
from simbal.balancing.composition import Composition
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.ragged import TopP
from simbal.balancing.thresholds import Capacity, DynamicQuantile, ExpertChoice, even_load, places, smallest_above
from simbal.errors import UserError
from simbal.model.router import Router, Routing, topk_indices
from tests.balancing.ragged_example import IDS_BS, LARGEST_SOFTMAX, LOGITS_NE, TWO_LARGEST, candidates, routing_by, sets


def finished(measured_LE, times=1) -> FinishedStep:
    return FinishedStep(measured_LE, times, [], 0.1, 1.0)


def test_expert_choice_looks_ahead_in_training_and_not_in_evaluation():
    changed_NE = LOGITS_NE.clone()
    changed_NE[3, 0] = 3.0
    strategy = ExpertChoice(1, 4)
    assert sets(strategy.choice_scores(candidates()))[0] == {0}
    assert sets(strategy.choice_scores(candidates(changed_NE)))[0] == {1, 2, 3}
    strategy.update(finished(strategy.measure([routing_by(strategy)])))
    strategy.eval()
    assert strategy.threshold_LE[0].tolist() == pytest.approx([0.6439, 0.3845, 0.1048, 0.0858], abs=1e-4)
    assert sets(strategy.choice_scores(candidates())) == LARGEST_SOFTMAX
    assert sets(strategy.choice_scores(candidates(changed_NE)))[:3] == LARGEST_SOFTMAX[:3]


def test_the_threshold_of_half_a_capacity_is_the_largest_probability():
    strategy = ExpertChoice(1, 4, 0.5)
    strategy.update(finished(strategy.measure([routing_by(strategy)])))
    assert sets(strategy.eval().choice_scores(candidates())) == [set(), {0, 2}, {1, 3}, set()]


def test_before_the_first_step_expert_choice_is_evaluated_with_each_tokens_k_most_probable():
    assert sets(ExpertChoice(1, 4).eval().choice_scores(candidates())) == TWO_LARGEST


@pytest.mark.parametrize(("factor", "each"), [(0.01, 1), (0.75, 1), (1.0, 2), (1.25, 2), (1.5, 3), (50.0, 4)])
def test_every_expert_takes_its_capacity_of_different_tokens(factor, each):
    routing = routing_by(ExpertChoice(1, 4, factor))
    assert routing.tokens_per_expert_E.tolist() == [each] * 4


@pytest.mark.parametrize(("p", "mean"), [(0.6, 1.5), (0.8, 2.25)])
def test_top_p_takes_as_few_experts_as_exceed_p(p, mean):
    routing = routing_by(TopP(p, 1.0))
    assert routing.tokens_per_expert_E.sum() / 4 == mean
    assert TopP(p, 1.0).loss(routing).item() == pytest.approx(1.068180, abs=1e-6)


def test_the_expert_that_reaches_p_exactly_does_not_exceed_it():
    even = candidates(torch.zeros(4, 4))
    assert sets(TopP(0.5).choice_scores(even)) == [{0, 1, 2}] * 4
    assert sets(TopP(0.0).choice_scores(even)) == [{0}] * 4


@given(st.integers(2, 9), st.floats(0, 0.99), st.integers(0, 99), st.sampled_from(["softmax", "sigmoid"]))
def test_the_experts_of_top_p_exceed_p_and_without_the_least_do_not(num_experts, p, seed, gating):
    logits_NE = 3 * torch.randn(4, num_experts, generator=torch.Generator().manual_seed(seed))
    each = candidates(logits_NE, gating=gating)
    for probs_E, scores_E in zip(each.probs_NE.double(), TopP(p).choice_scores(each), strict=True):
        used = scores_E > -torch.inf
        together, all_of_them = probs_E[used].sum(), probs_E.sum()
        assert together > p * all_of_them - 1e-9
        assert together - probs_E[used].min() <= p * all_of_them + 1e-9
        assert used.all() or probs_E[used].min() >= probs_E[~used].max()


def test_a_token_whose_sigmoids_are_all_0_has_every_expert_and_a_finite_loss():
    logits_NE = torch.full((4, 4), -300.0).requires_grad_()
    assert sets(TopP().choice_scores(candidates(logits_NE.detach(), gating="sigmoid"))) == [{0, 1, 2, 3}] * 4
    loss = TopP(coef=1.0).loss(Routing.of_logits(logits_NE, 2, torch.eye(4), gating="sigmoid"))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4))
    assert logits_NE.grad.isfinite().all()


def test_a_certain_token_has_a_finite_gradient():
    logits_NE = torch.tensor([[300.0, 0.0, 0.0, 0.0]]).requires_grad_()
    TopP(coef=1.0).loss(Routing.of_logits(logits_NE, 2, torch.eye(4))).backward()
    assert logits_NE.grad.isfinite().all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_p_below_0_or_from_1_on_is_refused(p):
    with pytest.raises(UserError, match="p=.* must be at least 0 and below 1"):
        TopP(p)


def test_dynamic_quantiles_on_logits_are_exceeded_by_two_tokens_of_each_expert():
    betas_E = smallest_above(LOGITS_NE, 2)
    assert betas_E.tolist() == pytest.approx([1.0, 0.8, -0.4, -1.0])
    assert sets(LOGITS_NE.masked_fill(betas_E > LOGITS_NE, -torch.inf)) == [{0, 1, 2}, {0, 2}, {3}, {1, 3}]


def test_dynamic_quantiles_are_the_corrected_running_mean_over_steps_and_micro_batches():
    strategy = DynamicQuantile(1, 4, smoothing=0.5)
    strategy.update(finished(2 * torch.tensor([[0.4, 0.3, 0.2, 0.1]]), 2))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    strategy.update(finished(torch.tensor([[0.1, 0.3, 0.2, 0.4]])))
    assert strategy.threshold_LE[0].tolist() == pytest.approx([0.2, 0.3, 0.2, 0.3])  # a third and two thirds


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_a_smoothing_that_keeps_everything_or_less_than_nothing_is_refused(smoothing):
    with pytest.raises(UserError, match="smoothing=.* must be at least 0 and below 1"):
        DynamicQuantile(1, 4, smoothing)


def test_capacity_keeps_the_weights_of_what_it_does_not_drop_and_counts_that_alone():
    plain = Routing.of_logits(LOGITS_NE, 2, torch.eye(4))
    routing = routing_by(Capacity(1.0))
    assert routing.tokens_per_expert_E.tolist() == [2, 2, 1, 0]
    assert routing.topk_experts_NK.tolist() == [[0, 1, 4, 4], [0, 2, 4, 4], [1, 4, 4, 4], [4, 4, 4, 4]]
    assert torch.equal(routing.topk_probs_NK[:2, :2], plain.topk_probs_NK[:2])
    assert routing.topk_probs_NK[2].tolist() == [plain.topk_probs_NK[2, 0].item(), 0, 0, 0]
    assert not routing.topk_probs_NK[3].any()
    assert routing.unsteered_experts_NK.tolist() == plain.topk_experts_NK.tolist()


def test_the_load_balancing_loss_sees_what_was_chosen_before_the_drops_unless_it_is_told_otherwise():
    plain, routing = Routing.of_logits(LOGITS_NE, 2, torch.eye(4)), routing_by(Capacity(1.0))
    assert LoadBalancingLoss().loss(routing).item() == LoadBalancingLoss().loss(plain).item()
    after = 4 * (torch.tensor([2, 2, 1, 0]) / 4 * plain.probs_NE.mean(0)).sum()
    assert LoadBalancingLoss(1.0, choice="biased").loss(routing).item() == pytest.approx(after.item())


def test_nothing_is_dropped_in_evaluation_nor_with_room_for_all():
    plain = Routing.of_logits(LOGITS_NE, 2, torch.eye(4))
    evaluated = routing_by(Capacity(1.0).eval())
    assert not evaluated.ragged
    assert not evaluated.steered
    assert torch.equal(evaluated.topk_experts_NK, plain.topk_experts_NK)
    assert torch.equal(evaluated.topk_probs_NK, plain.topk_probs_NK)
    roomy = routing_by(Capacity(2.0))
    assert torch.equal(roomy.topk_experts_NK[:, :2], plain.topk_experts_NK)
    assert torch.equal(roomy.topk_probs_NK[:, :2], plain.topk_probs_NK)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_places_are_those_of_a_queue(num_tokens, num_experts, top_k, seed):
    top_k = min(top_k, num_experts)
    experts_NK = topk_indices(
        torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)), top_k
    )
    waiting, expected = [0] * num_experts, torch.zeros(num_tokens, top_k, dtype=torch.int64)
    for choice in range(top_k):
        for token in range(num_tokens):
            expert = experts_NK[token, choice]
            expected[token, choice] = waiting[expert]
            waiting[expert] += 1
    assert torch.equal(places(experts_NK), expected)


def test_a_second_choice_of_a_later_token_drops_nobody_and_a_first_one_does():
    logits_NE = torch.tensor([[2.0, 1.0, 0.0, 0.0], [2.0, 0.0, 1.0, 0.0], [0.0, 0.0, 2.0, 1.0], [0.0, 1.0, 2.0, 0.0]])
    assert sets(Capacity(0.5).choice_scores(candidates(logits_NE))) == [{0, 1}, set(), {2, 3}, set()]
    logits_NE[3, 1] = 3.0  # now its first choice
    assert sets(Capacity(0.5).choice_scores(candidates(logits_NE))) == [{0}, set(), {2, 3}, {1}]


@pytest.mark.parametrize(("top_k", "causal"), [(1, True), (2, False)])
def test_capacity_is_causal_with_one_expert_per_token(top_k, causal):
    strategy = Capacity()
    Composition({"capacity": strategy}, {}).prepare([Router(4, 4, top_k, "softmax", True, layer=0)])
    assert strategy.properties.causal == causal
    assert not Capacity.properties.causal


def test_a_capacity_is_exact_where_its_factor_is_a_decimal():
    assert math.ceil(even_load(torch.zeros(10, 4), 4, 1.1)) == 11
    assert math.floor(even_load(torch.zeros(100, 4), 4, 0.29)) == 29


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan")])
def test_a_capacity_of_nothing_is_refused(factor):
    for strategy in (Capacity, lambda factor: ExpertChoice(1, 4, factor)):
        with pytest.raises(UserError, match="capacity_factor=.* must be "):
            strategy(factor)


@given(st.integers(0, 999))
def test_counts_and_empty_slots_make_up_the_table(seed):
    generator = torch.Generator().manual_seed(seed)
    scores_NE = torch.randn(4, 4, generator=generator)
    scores_NE[torch.rand(4, 4, generator=generator) < 0.5] = -torch.inf
    routing = Routing.of_logits(LOGITS_NE, 2, torch.eye(4), choice_scores=lambda *_: scores_NE, ragged=True)
    table = routing.topk_experts_NK
    assert routing.tokens_per_expert_E.sum() + (table == 4).sum() == table.numel() == IDS_BS.numel() * 4
    assert [{*row} - {4} for row in table.tolist()] == sets(scores_NE)


@pytest.mark.parametrize("strategy", [TopP(0.6), Capacity(0.5), ExpertChoice(1, 4)])
def test_a_load_balancing_loss_beside_it_is_the_same_in_the_scopes_of_one_batch(strategy):
    layer = routing_by(strategy)
    micro, whole = (LoadBalancingLoss(scope=scope, choice="biased") for scope in ("micro", "global"))
    assert whole.losses([layer], whole.measure([layer])).item() == pytest.approx(micro.loss(layer).item())

"""Strategies that change the choice or the logits: quantile, Sinkhorn, the blind controls, logit normalisation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.base import FinishedStep
from simbal.balancing.controls import HashRouting, UniformRouting, mixed, uniform_numbers
from simbal.balancing.logits import LogitNorm, Sinkhorn, expert_potential
from simbal.balancing.thresholds import QuantileBalancing, surplus
from simbal.errors import UserError
from simbal.model.router import Candidates, Router
from tests.balancing.example import PROBS_BSE, example


def skewed(N=600, E=8) -> torch.Tensor:
    """Logits that favour low indices."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, E, generator=generator) + torch.linspace(2, -2, E)


def counts(scores_NE, K=2) -> torch.Tensor:
    return torch.bincount(scores_NE.topk(K).indices.flatten(), minlength=scores_NE.shape[1])


def test_a_quantile_step_on_the_example_gives_the_bias_worked_out_by_hand():
    asked_E = surplus(PROBS_BSE.flatten(0, 1), torch.zeros(4), top_k=2)
    assert asked_E.tolist() == pytest.approx([0.1, 0, 0, -0.1])


def test_quantile_balancing_evens_a_skewed_load():
    scores_NE = skewed().softmax(-1)
    bias_E = torch.zeros(8)
    for _ in range(30):
        bias_E = surplus(scores_NE, bias_E, top_k=2)
    mean = 600 * 2 / 8
    assert counts(scores_NE).max() > 2 * mean
    assert counts(scores_NE - bias_E).max() < 1.1 * mean


def test_the_quantile_bias_is_the_smoothed_mean_over_micro_batches_and_centred():
    strategy = QuantileBalancing(1, 4, smoothing=0.75)
    _, routing = example()
    measured_LE = strategy.measure([routing]) + strategy.measure([routing])
    strategy.update(FinishedStep(measured_LE, 2, [], 0.1, 1.0))
    assert strategy.bias_LE[0].tolist() == pytest.approx([0.025, 0, 0, -0.025], abs=1e-8)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_a_smoothing_that_keeps_everything_or_less_than_nothing_is_refused(smoothing):
    with pytest.raises(UserError, match="smoothing=.* must be at least 0 and below 1"):
        QuantileBalancing(1, 4, smoothing)


def test_quantile_balancing_needs_an_expert_that_is_not_chosen():
    with pytest.raises(UserError, match="every expert is always chosen"):
        QuantileBalancing(1, 4, 0.9).prepare([Router(4, 2, 2, "softmax", True, layer=0)])


def test_sinkhorn_potentials_make_the_marginals_even():
    logits_NE = skewed().double()
    v_E = expert_potential(logits_NE, 50)
    shares_NE = (logits_NE + v_E).softmax(1)
    torch.testing.assert_close(shares_NE.sum(0), torch.full((8,), 600 / 8).double(), rtol=1e-4, atol=0)


def test_sinkhorn_evens_the_load_in_training_and_leaves_evaluation_alone():
    candidates = Candidates(0, torch.zeros(1, 600), skewed(), skewed().softmax(-1), 2)
    strategy = Sinkhorn(10)
    assert counts(strategy.choice_scores(candidates), 1).max() < 1.5 * 75
    assert torch.equal(strategy.eval().choice_scores(candidates), candidates.logits_NE)


@pytest.mark.parametrize("iterations", [0, -1, 2.5])
def test_sinkhorn_needs_whole_iterations(iterations):
    with pytest.raises(UserError, match="iterations=.* must be a whole number of at least 1"):
        Sinkhorn(iterations)


def candidates_of(tokens_BS, layer=0, E=8) -> Candidates:
    logits_NE = torch.zeros(tokens_BS.numel(), E)
    return Candidates(layer, tokens_BS, logits_NE, logits_NE, 2)


def test_hash_routing_is_a_function_of_the_token_id_and_the_layer():
    tokens_BS = torch.randint(100, (4, 200), generator=torch.Generator().manual_seed(0))
    scores_NE = HashRouting(0).choice_scores(candidates_of(tokens_BS))
    by_id: dict[int, set] = {}
    for token, row in zip(tokens_BS.flatten().tolist(), scores_NE.tolist(), strict=True):
        by_id.setdefault(token, set()).add(tuple(row))
    assert {len(rows) for rows in by_id.values()} == {1}
    for other in (HashRouting(1).choice_scores(candidates_of(tokens_BS)),
                  HashRouting(0).choice_scores(candidates_of(tokens_BS, layer=1))):  # fmt: skip
        assert not torch.equal(scores_NE, other)


def test_uniform_routing_draws_anew_at_each_step_and_place_and_spreads_evenly():
    tokens_BS = torch.zeros(1, 4000, dtype=torch.int64)  # one id all along
    strategy = UniformRouting(0)
    first = strategy.choice_scores(candidates_of(tokens_BS))
    assert torch.equal(first, strategy.choice_scores(candidates_of(tokens_BS)))
    strategy.update(FinishedStep(torch.zeros(1, 8), 1, [], 0.1, 1.0))
    second = strategy.choice_scores(candidates_of(tokens_BS))
    even = 4000 * 2 / 8
    for scores_NE in (first, second):
        deviation_E = (counts(scores_NE) - even) / (even * 6 / 8) ** 0.5
        assert deviation_E.abs().max() < 4.5  # standard deviations
    overlap = (first.topk(2).indices[:, :, None] == second.topk(2).indices[:, None]).any(2).double().mean()
    assert overlap.item() == pytest.approx(2 / 8, abs=0.03)


def test_uniform_routing_draws_by_all_that_came_before_in_the_sequence():
    strategy, tokens_BS = UniformRouting(0), torch.tensor([[1, 5, 5], [2, 5, 5], [1, 5, 6]])
    scores_BSE = strategy.choice_scores(candidates_of(tokens_BS)).view(3, 3, -1)
    assert torch.equal(scores_BSE[0, :2], scores_BSE[2, :2])
    assert (scores_BSE[0, 1:] != scores_BSE[1, 1:]).all()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_the_mixing_function_is_splitmix64(number, seed):
    def reference(z: int) -> int:
        mask = 2**64 - 1
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert mixed(torch.tensor(number)).item() % 2**64 == reference(number % 2**64)
    numbers_NE = uniform_numbers(torch.tensor([number]), 5, seed, layer=3)
    assert ((numbers_NE >= 0) & (numbers_NE < 1)).all()
    assert len(set(numbers_NE.flatten().tolist())) == 5


def test_normalised_logits_have_the_given_spread_and_the_same_choice():
    logits_NE = 7 * skewed(20) - 3
    normed_NE = LogitNorm(2.0).adjust_logits(logits_NE)
    torch.testing.assert_close(normed_NE.std(1, correction=0), torch.full((20,), 2.0))
    torch.testing.assert_close(normed_NE.mean(1), torch.zeros(20), atol=1e-6, rtol=0)
    assert torch.equal(normed_NE.topk(2).indices, logits_NE.topk(2).indices)


def test_equal_logits_stay_equal_with_a_finite_gradient():
    logits_NE = torch.zeros(2, 4, requires_grad=True)
    normed_NE = LogitNorm(1.0).adjust_logits(logits_NE)
    assert not normed_NE.any()
    (gradient_NE,) = torch.autograd.grad(normed_NE[0, 0], logits_NE)
    assert gradient_NE.isfinite().all()

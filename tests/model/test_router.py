"""The router's choice, weights, precision and initialization, and the limit to groups of experts."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.model.init import init_router
from simbal.model.router import Candidates, Groups, Router, Routing, Steering, topk_indices


def router(gating="softmax", renormalize=True, E=6, K=2, D=8, std=1.0) -> Router:
    module = Router(D, E, K, gating, renormalize, layer=0)
    torch.nn.init.normal_(module.weight_ED, std=std, generator=torch.Generator().manual_seed(0))
    return module


def states(N=10, D=8):
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1))


def ids(N=10, B=1):
    return torch.arange(N).view(B, -1)


class Biased(Steering):
    """Chooses by logits + bias."""

    def __init__(self, bias_E: torch.Tensor) -> None:
        self.bias_E = bias_E

    def choice_scores(self, candidates: Candidates):
        return candidates.logits_NE + self.bias_E


@given(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]), st.booleans(), st.integers(1, 8), st.data())
def test_choice_is_the_top_k_and_weights_are_its_probabilities(gating, renormalize, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    routing = router(gating, renormalize, num_experts, top_k)(states(), ids(B=2))
    chosen = routing.probs_NE.gather(1, routing.topk_experts_NK)
    assert torch.equal(chosen.sort(descending=True).values, routing.probs_NE.topk(top_k).values)
    want = chosen / chosen.sum(1, keepdim=True) if renormalize else chosen
    torch.testing.assert_close(routing.topk_probs_NK, want)
    assert routing.tokens_per_expert_E.sum() == 10 * top_k
    torch.testing.assert_close(routing.distribution_NE.sum(1), torch.ones(10))


@given(st.integers(0, 5), st.integers(1, 40), st.booleans(), st.data())
def test_topk_indices_are_the_first_of_a_stable_sort(top_k, num_experts, fp64, data):
    """Including ties, -inf and NaN, both for the argmax passes and for the sort."""
    assume(top_k <= num_experts)
    score = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 2.0, math.inf, math.nan])
    rows = st.lists(st.lists(score, min_size=num_experts, max_size=num_experts), min_size=1, max_size=4)
    scores_NE = torch.tensor(data.draw(rows), dtype=torch.float64 if fp64 else torch.float32)
    before_NE = scores_NE.clone()
    want_NK = scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(topk_indices(scores_NE, top_k), want_NK)
    torch.testing.assert_close(scores_NE, before_NE, rtol=0, atol=0, equal_nan=True)


def test_a_bias_affects_the_choice_but_not_the_weights_and_a_constant_changes_nothing():
    module, bias_E = router(renormalize=False), torch.tensor([0.0, 0, 0, 9, 9, 0])
    routing = module(states(), ids(), Biased(bias_E))
    assert set(routing.topk_experts_NK.flatten().tolist()) == {3, 4}
    assert torch.equal(routing.topk_probs_NK, routing.probs_NE.gather(1, routing.topk_experts_NK))
    assert torch.equal(routing.topk_experts_NK, module(states(), ids(), Biased(bias_E + 5)).topk_experts_NK)
    plain = module(states(), ids())
    assert (routing.steered, plain.steered) == (True, False)
    assert torch.equal(routing.unsteered_experts_NK, plain.topk_experts_NK)


def test_sigmoids_that_underflow_still_give_weights_and_a_distribution():
    low = router("sigmoid", std=1e-3)
    low.weight_ED.data.fill_(-30)
    routing = low(torch.ones(3, 8), ids(3))
    assert routing.probs_NE.max() == 0
    assert torch.equal(routing.topk_probs_NK, torch.full((3, 2), 0.5))
    torch.testing.assert_close(routing.distribution_NE, torch.full((3, 6), 1 / 6))


def test_sqrtsoftplus_has_the_weights_and_slopes_of_deepseek_v4():
    logits_NE = torch.tensor([[-2.0, 0, 1, 3]], requires_grad=True)
    routing = Routing.of_logits(logits_NE, 2, torch.eye(4), gating="sqrtsoftplus", scale=1.5)
    assert routing.probs_NE[0].tolist() == pytest.approx([0.356270, 0.832555, 1.145976, 1.746020], abs=1e-6)
    assert routing.topk_experts_NK.tolist() == [[3, 2]]
    assert routing.topk_probs_NK[0].tolist() == pytest.approx([0.905613, 0.594387], abs=1e-6)
    assert routing.distribution_NE[0].tolist() == pytest.approx([0.087303, 0.204016, 0.280820, 0.427860], abs=1e-6)
    (slope_NE,) = torch.autograd.grad(routing.probs_NE.sum(), logits_NE)  # sigmoid(z) / (2 s)
    assert slope_NE[0].tolist() == pytest.approx([0.167293, 0.300281, 0.318968, 0.272784], abs=1e-6)


def test_sqrtsoftplus_has_finite_weights_and_gradients_for_logits_far_below_zero():
    logits_NE = torch.tensor([[-200.0, -300, -250, -200], [-200, 1, 2, -90]], requires_grad=True)
    routing = Routing.of_logits(logits_NE, 2, torch.eye(4), gating="sqrtsoftplus")
    total = (routing.topk_probs_NK + routing.probs_NE[:, :2] + routing.distribution_NE[:, :2]).sum()
    assert total.isfinite()
    assert torch.autograd.grad(total, logits_NE)[0].isfinite().all()
    torch.testing.assert_close(routing.distribution_NE.sum(1), torch.ones(2))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "sqrtsoftplus", "relu"])
def test_the_scale_multiplies_the_weights_of_every_gating_and_changes_nothing_else(gating, renormalize):
    def route(scale):
        module = router(gating, renormalize)
        module.scale = scale
        return module(states(), ids())

    plain, scaled = route(1.0), route(2.5)
    assert torch.equal(scaled.topk_probs_NK, 2.5 * plain.topk_probs_NK)
    for name in ("probs_NE", "distribution_NE", "topk_experts_NK"):
        assert torch.equal(getattr(scaled, name), getattr(plain, name))


def test_routing_stays_fp32_under_bf16_parameters_and_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        module = router().bfloat16()
        routing = module(states().bfloat16(), ids())
    assert {routing.logits_NE.dtype, routing.probs_NE.dtype, routing.topk_probs_NK.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_NE, states().bfloat16().float() @ module.weight_ED.float().T)


@pytest.mark.parametrize(("kind", "row_norm"), [("orthogonal", 1.0), ("normal", 0.02 * 512**0.5), ("normal_unit", 1.0)])
def test_router_initializations_have_their_row_norms(kind, row_norm):
    weight_ED = torch.empty(8, 512)
    init_router(weight_ED, kind, 0.02, torch.Generator().manual_seed(0))
    assert weight_ED.norm(dim=1).mean().item() == pytest.approx(row_norm, rel=0.05)
    if kind == "orthogonal":
        torch.testing.assert_close(weight_ED @ weight_ED.T, torch.eye(8), atol=1e-5, rtol=0)


def test_more_orthogonal_rows_than_dimensions_are_refused():
    with pytest.raises(UserError, match=r"num_experts=9 rows cannot be orthogonal in model.d_model=8"):
        init_router(torch.empty(9, 8), "orthogonal", 0.02, torch.Generator())


CLOSED = -math.inf


@pytest.mark.parametrize(
    ("groups", "scores", "limited"),
    [
        (Groups(4, 1, "best"), [9, 0, 5, 5, 1, 1, 2, 2], [9, 0, *[CLOSED] * 6]),
        (Groups(4, 1, "best two"), [9, 0, 5, 5, 1, 1, 2, 2], [CLOSED, CLOSED, 5, 5, *[CLOSED] * 4]),
        (Groups(2, 1, "best two"), [-0.5, -0.25, -2, -1], [-0.5, -0.25, CLOSED, CLOSED]),  # negative scores
        (Groups(3, 2, "best two"), [1, 1, 2, 0, 0, 2], [1, 1, 2, 0, CLOSED, CLOSED]),  # a tie
    ],
)
def test_groups_exclude_the_experts_of_all_but_the_best_groups(groups, scores, limited):
    assert groups.limited(torch.tensor([scores]).float()).tolist() == [limited]


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_groups_equal_a_sort_of_the_groups(count, size, data):
    chosen = data.draw(st.integers(1, count))
    score, best = data.draw(st.sampled_from([("best", 1), ("best two", 2)]))
    scores_NE = torch.randn(7, count * size, generator=torch.Generator().manual_seed(count * size))
    for row, limited in zip(scores_NE.tolist(), Groups(count, chosen, score).limited(scores_NE).tolist(), strict=True):
        groups = [row[first : first + size] for first in range(0, len(row), size)]
        order = sorted(range(count), key=lambda group: -sum(sorted(groups[group])[-best:]))
        assert limited == [x if i // size in order[:chosen] else CLOSED for i, x in enumerate(row)]

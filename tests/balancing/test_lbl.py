"""The readings of the load balancing loss equal values worked out by hand, and their gradients closed forms."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.composition import Composition, build_strategy
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss
from simbal.conformance import FACTS
from simbal.errors import UserError
from simbal.model.router import Router, Routing
from tests.balancing.cases import registered
from tests.balancing.example import example, mirrored, routing_of

EQUATION_3 = {"gates": "dense", "scope": "sequence", "norm": "E", "choice": "unbiased", "over_layers": None}


def lbl(coef: float = 1.0, **changes) -> LoadBalancingLoss:
    return LoadBalancingLoss(coef, **(EQUATION_3 | changes))


@pytest.mark.parametrize(
    ("changes", "value", "gradient_E"),
    [
        ({}, 19 / 8, [0.14, -0.045, -0.03, -0.065]),
        ({"scope": "micro"}, 171 / 80, [0.07, -0.0225, -0.015, -0.0325]),
        ({"gates": "sparse_raw"}, 19 / 10, [0.18, -0.015, -0.11, -0.055]),
        ({"gates": "sparse_renorm"}, 291 / 112, [0.122449, -0.122449, 0, 0]),
        ({"scope": "micro", "norm": "E/K"}, 171 / 160, [0.035, -0.01125, -0.0075, -0.01625]),
    ],
)
def test_each_reading_has_its_value_and_gradient_on_the_example(changes, value, gradient_E):
    logits_NE, routing = example()
    assert routing.tokens_per_expert_E.tolist() == [3, 2, 2, 1]
    loss = lbl(**changes).loss(routing)
    assert loss.item() == pytest.approx(value)
    (gradient_NE,) = torch.autograd.grad(loss, logits_NE)
    assert gradient_NE[0].tolist() == pytest.approx(gradient_E, abs=1e-6)


def test_the_gradient_is_the_closed_form_of_equation_3():
    logits_NE, routing = example()
    (gradient_NE,) = torch.autograd.grad(lbl().loss(routing), logits_NE)
    p_BSE = routing.probs_NE.view(2, 2, 4)
    f_B1E = torch.tensor([[[1.0, 0.5, 0.5, 0]], [[0.5, 0.5, 0.5, 0.5]]]).double()
    want = 4 / 4 * p_BSE * (f_B1E - (f_B1E * p_BSE).sum(-1, keepdim=True))
    torch.testing.assert_close(gradient_NE.view(2, 2, 4), want)


def test_the_global_scope_is_the_micro_batch_on_one_rank_without_accumulation():
    _, routing = example()
    strategy = lbl(scope="global")
    counts_LE = strategy.measure([routing])
    assert counts_LE.tolist() == [[3, 2, 2, 1, 4]]
    assert strategy.losses([routing], counts_LE).item() == pytest.approx(171 / 80)


def test_the_global_scope_of_micro_batches_averages_to_that_of_the_batch():
    logits_NE, _ = example()
    strategy = lbl(scope="global")
    halves = [routing_of(half_NE, 1) for half_NE in logits_NE.chunk(2)]
    step_counts_LE = sum(strategy.measure([half]) for half in halves)
    losses = [strategy.losses([half], step_counts_LE).item() for half in halves]
    assert sum(losses) / 2 == pytest.approx(171 / 80)
    running = [strategy.losses([half], strategy.measure([half])).item() for half in halves]
    assert sum(running) / 2 == pytest.approx(19 / 8)  # what is known of one half at a time is another loss


def test_the_pooled_loss_calls_two_opposite_imbalances_even():
    _, routing = example()
    pooled = PooledLoadBalancingLoss(1.0).losses([routing, mirrored(routing)], None)
    assert pooled.tolist() == pytest.approx([2, 2])
    apart = Composition({"lbl": lbl(scope="micro")}, {}, "mean").losses([routing, mirrored(routing)])
    assert apart["lbl"].item() == pytest.approx(171 / 80)


def test_uniform_routing_is_no_lower_bound():
    p_NE = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.01, 0.99]]).double()
    assert lbl().loss(routing_of(p_NE.log(), 1, K=1)).item() == pytest.approx(403 / 450)


@pytest.mark.parametrize(("choice", "counts"), [("unbiased", [3, 2, 2, 1]), ("biased", [4, 4, 0, 0])])
def test_under_a_bias_the_counts_are_those_of_the_choice_that_was_asked_for(choice, counts):
    logits_NE, _ = example()
    biased = routing_of(logits_NE, 2, experts_NK=torch.tensor([[0, 1]] * 4))
    strategy = lbl(scope="global", choice=choice)
    assert strategy.measure([biased]).tolist() == [[*counts, 4]]
    f_E = torch.tensor(counts) / 4
    want = 4 * (f_E * biased.probs_NE.mean(0)).sum().item()
    assert lbl(scope="micro", choice=choice).loss(biased).item() == pytest.approx(want)


def test_a_chosen_weight_that_underflows_is_counted():
    logits_NE = torch.tensor([[200.0, 0, -1, -2]])
    routing = routing_of(logits_NE, 1)
    assert routing.probs_NE[0, 1] == 0
    assert lbl(gates="sparse_raw", scope="global").measure([routing]).tolist() == [[1, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("changes", "reduced", "effective"),
    [({}, "sum", 0.32), ({}, "mean", 0.04), ({"norm": "E/K", "over_layers": "mean"}, "sum", 0.01)],
)
def test_the_effective_coefficient_is_that_of_the_papers_m_model(changes, reduced, effective):
    strategy = lbl(0.01, **changes)
    reduction = Composition({"lbl": strategy}, {}, reduced).layer_reduction("lbl")
    assert strategy.effective_coef(8 if reduction == "sum" else 1, top_k=4) == pytest.approx(effective)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 5), st.sampled_from(["softmax", "sigmoid"]), st.data())
def test_the_loss_equals_loops_over_its_definition(B, S, E, gating, data):
    K = data.draw(st.integers(1, E))
    seed = data.draw(st.integers(0, 1000))
    logits_NE = torch.randn(B * S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    routing = routing_of(logits_NE, B, K, gating)
    total = 0.0
    for b in range(B):
        for i in range(E):
            rows = range(b * S, (b + 1) * S)
            f = sum(i in routing.topk_experts_NK[t].tolist() for t in rows) / S
            p = sum((routing.probs_NE[t, i] / routing.probs_NE[t].sum()).item() for t in rows) / S
            total += E * f * p / B
    assert lbl().loss(routing).item() == pytest.approx(total)
    one_group = replace(routing, num_sequences=1)
    assert lbl(scope="micro").loss(routing).item() == pytest.approx(lbl().loss(one_group).item())


def listing(gates_BSE: torch.Tensor) -> torch.Tensor:
    """`balance_loss` of the paper's first listing, line by line; einops.reduce("b t e -> b e", "mean") is mean(1)."""
    _, _, num_experts = gates_BSE.shape
    expert_mask = gates_BSE > 0.0
    f_i = expert_mask.float().mean(1)
    P_i = gates_BSE.mean(1)
    loss_per_batch = num_experts * torch.sum(f_i * P_i, dim=-1)
    return loss_per_batch.mean()


@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(2, 5), st.sampled_from(["softmax", "sigmoid"]), st.booleans(),
    st.booleans(), st.data(),
)  # fmt: skip
def test_the_listing_is_the_papers_of_the_weights_with_which_the_layer_adds_its_experts(
    B, S, E, gating, renormalize, steered, data
):
    K, seed = data.draw(st.integers(1, E)), data.draw(st.integers(0, 1000))
    x_ND, bias_NE = torch.randn(2, B * S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    part = build_strategy("lbl_listing", registered()["lbl_listing"] | {"coef": 1.0}, FACTS)
    x_ND.requires_grad_()
    choice_scores = (lambda logits_NE, probs_NE: logits_NE + bias_NE) if steered else None
    routing = Routing.of_logits(x_ND, K, torch.eye(E), B, gating, renormalize, choice_scores)
    gates_NE = torch.zeros_like(x_ND).scatter(1, routing.topk_experts_NK, routing.topk_probs_NK)
    want = listing(gates_NE.view(B, S, E))
    torch.testing.assert_close(part.loss(routing), want)
    gradients = [torch.autograd.grad(loss, x_ND, retain_graph=True)[0] for loss in (part.loss(routing), want)]
    torch.testing.assert_close(*gradients)


def test_counts_of_another_choice_than_the_layers_are_refused():
    with pytest.raises(UserError, match="choice=unbiased must be biased with gates=layer"):
        lbl(gates="layer")


@pytest.mark.parametrize("key", ["gates", "scope", "norm", "choice", "over_layers"])
def test_an_unknown_reading_is_refused(key):
    with pytest.raises(UserError, match=f"{key}=odd is not one of"):
        lbl(**{key: "odd"})


def test_a_model_that_always_chooses_every_expert_is_refused():
    with pytest.raises(UserError, match="every expert is always chosen"):
        lbl().prepare([Router(4, 2, 2, "softmax", True, layer=0)])

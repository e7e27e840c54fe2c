"""All variants of the load-balancing loss equal values computed by hand, loops, and other implementations."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func as olmoe_loss

from simbal.balancing.composition import Composition, build_strategy
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss, RouterZLoss
from simbal.conformance import FACTS
from simbal.model.router import Routing
from tests.balancing.cases import registered
from tests.balancing.example import example, mirrored, routing_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # beartype complains about the style of type hints
    from st_moe_pytorch.st_moe_pytorch import TopNGating


def lbl(coef: float = 1.0, **changes) -> LoadBalancingLoss:
    return LoadBalancingLoss(coef, **changes)


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
def test_each_variant_has_its_value_and_gradient_on_the_example(changes, value, gradient_E):
    logits_NE, routing = example()
    assert routing.tokens_per_expert_E.tolist() == [3, 2, 2, 1]
    loss = lbl(**changes).loss(routing)
    assert loss.item() == pytest.approx(value)
    (gradient_NE,) = torch.autograd.grad(loss, logits_NE)
    assert gradient_NE[0].tolist() == pytest.approx(gradient_E, abs=1e-6)


def test_the_global_scope_of_micro_batches_averages_to_that_of_the_batch():
    logits_NE, routing = example()
    strategy = lbl(scope="global")
    assert strategy.measure([routing]).tolist() == [[3, 2, 2, 1, 4]]
    halves = [routing_of(half_NE, 1) for half_NE in logits_NE.chunk(2)]
    step_counts_LE = sum(strategy.measure([half]) for half in halves)
    losses = [strategy.losses([half], step_counts_LE).item() for half in halves]
    assert sum(losses) / 2 == pytest.approx(171 / 80)
    separate = [strategy.losses([half], strategy.measure([half])).item() for half in halves]
    assert sum(separate) / 2 == pytest.approx(19 / 8)  # counts of one half at a time give another loss


def test_the_pooled_loss_does_not_see_opposite_imbalances():
    _, routing = example()
    pooled = PooledLoadBalancingLoss(1.0).losses([routing, mirrored(routing)], None)
    assert pooled.tolist() == pytest.approx([2, 2])
    separate = Composition({"lbl": lbl(scope="micro")}, {}, "mean").losses([routing, mirrored(routing)])
    assert separate["lbl"].item() == pytest.approx(171 / 80)


def test_uniform_routing_is_not_a_lower_bound():
    p_NE = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.01, 0.99]]).double()
    assert lbl().loss(routing_of(p_NE.log(), 1, K=1)).item() == pytest.approx(403 / 450)


@pytest.mark.parametrize(("choice", "counts"), [("unbiased", [3, 2, 2, 1]), ("biased", [4, 4, 0, 0])])
def test_under_a_bias_f_counts_the_selected_choice(choice, counts):
    logits_NE, _ = example()
    biased = routing_of(logits_NE, 2, experts_NK=torch.tensor([[0, 1]] * 4))
    assert lbl(scope="global", choice=choice).measure([biased]).tolist() == [[*counts, 4]]
    want = 4 * (torch.tensor(counts) / 4 * biased.probs_NE.mean(0)).sum().item()
    assert lbl(scope="micro", choice=choice).loss(biased).item() == pytest.approx(want)


def test_a_chosen_expert_whose_weight_underflows_is_counted():
    routing = routing_of(torch.tensor([[200.0, 0, -1, -2]]), 1)
    assert routing.probs_NE[0, 1] == 0
    assert lbl(gates="sparse_raw", scope="global").measure([routing]).tolist() == [[1, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("changes", "reduced", "effective"),
    [({}, "sum", 0.32), ({}, "mean", 0.04), ({"norm": "E/K", "over_layers": "mean"}, "sum", 0.01)],
)
def test_the_effective_coefficient_for_the_papers_m_model(changes, reduced, effective):
    strategy = lbl(0.01, **changes)
    reduction = Composition({"lbl": strategy}, {}, reduced).layer_reduction("lbl")
    assert strategy.effective_coef(8 if reduction == "sum" else 1, top_k=4) == pytest.approx(effective)


@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(2, 5), st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from(["dense", "sparse_raw"]), st.data(),
)  # fmt: skip
def test_the_loss_equals_loops_over_its_definition(B, S, E, gating, gates, data):
    K, seed = data.draw(st.integers(1, E)), data.draw(st.integers(0, 1000))
    logits_NE = torch.randn(B * S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    routing = routing_of(logits_NE, B, K, gating)
    total = 0.0
    for b in range(B):
        for i in range(E):
            rows = range(b * S, (b + 1) * S)
            chosen = [t for t in rows if i in routing.topk_experts_NK[t].tolist()]
            averaged = rows if gates == "dense" else chosen
            p = sum((routing.probs_NE[t, i] / routing.probs_NE[t].sum()).item() for t in averaged) / S
            total += E * len(chosen) / S * p / B
    assert lbl(gates=gates).loss(routing).item() == pytest.approx(total)
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
def test_lbl_listing_equals_the_papers_listing_of_the_layers_weights(B, S, E, gating, renormalize, steered, data):
    K, seed = data.draw(st.integers(1, E)), data.draw(st.integers(0, 1000))
    x_ND, bias_NE = torch.randn(2, B * S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    strategy = build_strategy("lbl_listing", registered()["lbl_listing"] | {"coef": 1.0}, FACTS)
    x_ND.requires_grad_()
    choice_scores = (lambda logits_NE, probs_NE: logits_NE + bias_NE) if steered else None
    routing = Routing.of_logits(x_ND, K, torch.eye(E), B, gating, renormalize, choice_scores)
    gates_NE = torch.zeros_like(x_ND).scatter(1, routing.topk_experts_NK, routing.topk_probs_NK)
    losses = strategy.loss(routing), listing(gates_NE.view(B, S, E))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x_ND, retain_graph=True)[0] for loss in losses))


L, B, S, E, K = 3, 2, 10, 6, 2


def logits_of(layer: int) -> torch.Tensor:
    return torch.randn(B * S, E, generator=torch.Generator().manual_seed(layer)) + torch.linspace(1, -1, E) * layer


@pytest.mark.parametrize("public", [mixtral_loss, olmoe_loss])
def test_the_pooled_loss_equals_transformers_with_its_gradient(public):
    logits_LNE = torch.stack([logits_of(layer) for layer in range(L)]).requires_grad_()
    theirs = public(tuple(logits_LNE), E, K)
    ours = PooledLoadBalancingLoss(1.0).losses([routing_of(logits_NE, B, K) for logits_NE in logits_LNE], None).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, logits_LNE), torch.autograd.grad(theirs, logits_LNE))


@pytest.mark.parametrize("public", [mixtral_loss, olmoe_loss])
def test_for_one_layer_transformers_equals_equation_3_over_the_batch_and_k_times_lbl_olmoe(public):
    logits_NE = logits_of(1)
    routing, theirs = routing_of(logits_NE, B, K), public((logits_NE,), E, K)
    torch.testing.assert_close(lbl(scope="micro").loss(routing), theirs)
    olmoe = build_strategy("lbl_olmoe", registered()["lbl_olmoe"] | {"coef": 1.0}, FACTS)
    assert olmoe.over_layers == "mean"
    torch.testing.assert_close(K * olmoe.loss(routing), theirs)


def test_st_moe_pytorch_equals_equation_3_for_k_1_and_the_router_z_loss():
    generator = torch.Generator().manual_seed(0)
    x_BSD, weight_ED = torch.randn(B, S, 8, generator=generator), torch.randn(E, 8, generator=generator)
    gating = TopNGating(8, E, top_n=2, capacity_factor_train=E, threshold_train=0.0)
    gating.to_gates.weight.data.copy_(weight_ED)
    _, _, balance_loss, router_z_loss = gating(x_BSD)
    logits_NE = x_BSD.flatten(0, 1) @ weight_ED.T
    torch.testing.assert_close(lbl().loss(routing_of(logits_NE, B, K=1)), balance_loss)
    torch.testing.assert_close(RouterZLoss(1.0).loss(routing_of(logits_NE, B)), router_z_loss)
    by_hand = RouterZLoss(1.0).loss(routing_of(torch.tensor([[1.0, 2.0, 3.0]]).log(), 1))
    assert by_hand.item() == pytest.approx(3.210402, abs=1e-6)

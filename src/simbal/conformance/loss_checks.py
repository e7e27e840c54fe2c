"""What every strategy promises of its loss and its choices on hand-made routings.

Each promise is a function that raises AssertionError if it is broken.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from simbal.balancing.base import Balancing, Properties
from simbal.balancing.composition import Composition
from simbal.conformance.case import SIZES, Case
from simbal.model.router import ExpertWeights, Router, Routing

E, K, D, F = SIZES["num_experts"], 2, 16, 3
TOKENS_BS = torch.arange(24).view(2, 12)


def route(
    x_ND: Tensor, weight_ED: Tensor, case: Case, strategy: Balancing, experts: ExpertWeights | None = None
) -> Routing:
    """Return one layer's routing, in the dtype of the weight; with experts, the same ones unless they are given."""
    router = Router(weight_ED.shape[1], len(weight_ED), K, case.gating, case.renormalize, layer=0)
    del router.weight_ED
    router.weight_ED = weight_ED  # type: ignore[assignment]  # in place of the parameter
    router.keeps_input = True
    routing: Routing = router(x_ND, TOKENS_BS, Composition({"it": strategy}, {}))
    return replace(routing, experts=random_experts(weight_ED.shape[1]) if experts is None else experts)


def losses(strategy: Balancing, routings: Sequence[Routing]) -> Tensor:
    """Return the strategy's loss of each layer, for a step of one micro-batch."""
    return strategy.losses(routings, strategy.measure(routings) if strategy.needs_step_counts else None)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_experts(d_model: int, seed: int = 0) -> ExpertWeights:
    """Return experts with normal weights, the same for the same seed."""
    return ExpertWeights(random(E, 2, F, d_model, seed=seed), random(E, F, d_model, seed=seed + 1))


def says_what_it_is(case: Case) -> None:
    """Check that it declares its properties, its formula and where it is from."""
    strategy = case.make()
    assert isinstance(getattr(strategy, "properties", None), Properties), "declares no properties"
    assert strategy.formula
    assert strategy.citation


def its_gradient_reaches_the_router(case: Case) -> None:
    """Check the gradient of each layer's router against a central difference; a strategy without one has no loss.

    Of a loss that sees experts it is the gradient of router and experts together.
    """
    strategy, x_ND = case.make(), random(24, D)
    weights = [random(E, D, seed=layer + 1).mul_(0.5).requires_grad_() for layer in range(2)]
    experts = [ExpertWeights(*(each.requires_grad_() for each in random_experts(D, seed))) for seed in (3, 5)]

    def total() -> Tensor:
        layers = zip(weights, experts, strict=True)
        return losses(strategy, [route(x_ND, weight_ED, case, strategy, each) for weight_ED, each in layers]).sum()

    if strategy.coef:
        strategy.coef = 1.0  # so that rounding is small beside the gradient
    value = total()
    if not strategy.properties.differentiable:
        assert value == 0
        return
    for weight_ED, of_layer in zip(weights, experts, strict=True):
        seen = [weight_ED, *(of_layer if strategy.needs_experts else ())]
        gradients = torch.autograd.grad(value, seen, retain_graph=True, materialize_grads=True)
        gradient, start = (torch.cat([each.detach().flatten() for each in tensors]) for tensors in (gradients, seen))
        assert gradient.norm() > 1e-6, "no gradient"
        direction, central = random(len(start), seed=9), []
        with torch.no_grad():
            for place in (start + 1e-6 * direction, start - 1e-6 * direction, start):
                vector_to_parameters(place, seen)
                central.append(total())
        slope = (central[0] - central[1]) / 2e-6
        torch.testing.assert_close(gradient @ direction, slope, rtol=1e-5, atol=1e-7)


def it_is_linear_in_its_coefficient(case: Case) -> None:
    """Check that three times the coefficient is three times the loss, and none is none."""
    strategy = case.make()
    if not strategy.properties.differentiable:
        return
    routing = route(random(24, D), random(E, D, seed=1), case, strategy)
    values = []
    for strategy.coef in (1.0, 3.0, 0.0):
        values.append(losses(strategy, [routing, routing]))
    torch.testing.assert_close(values[1], 3 * values[0])
    assert (values[2] == 0).all()


def a_loss_of_weights_looks_at_nothing_else_if_declared(case: Case) -> None:
    """Check it; `cases_of` has such a strategy under one gating alone."""
    strategy = case.make()
    if not strategy.properties.differentiable:
        return
    weight_ED = random(E, D, seed=1)
    gatings = {replace(case, gating=gating) for gating in ("softmax", "sigmoid")}
    values = [losses(strategy, [route(random(24, D, seed=seed), weight_ED, each, strategy)] * 2)
              for seed, each in enumerate(gatings)]  # fmt: skip
    assert torch.equal(*values) == (strategy.properties.scope == "weights")


def layers_mix_only_if_declared(case: Case) -> None:
    """Check whether another layer's routing changes a layer's loss."""
    strategy = case.make()
    first, second, third = (route(random(24, D), random(E, D, seed=seed), case, strategy) for seed in (1, 2, 3))
    apart = torch.equal(losses(strategy, [first, second])[0], losses(strategy, [first, third])[0])
    assert apart != strategy.properties.mixes_layers


def a_dead_expert_is_drawn_in_as_declared(case: Case) -> None:
    """Check whether an expert without tokens is raised by the gradient, or chosen after updates."""
    strategy = case.make()
    logits_NE = 0.2 * random(24, E)  # so close to each other that a bias of small steps is soon there
    logits_NE[:, -1] = logits_NE.min() - 0.2 - 0.1 * logits_NE[:, -1].abs()  # a threshold tells no equal ones apart
    logits_NE.requires_grad_()
    identity_EE = torch.eye(E, dtype=torch.float64, requires_grad=True)
    balancing = Composition({"it": strategy}, {})
    routing = route(logits_NE, identity_EE, case, strategy)
    (gradient_NE,) = torch.autograd.grad(losses(strategy, [routing, routing]).sum() + 0 * logits_NE.sum(), logits_NE)
    raised = gradient_NE[:, -1].mean() < -1e-9
    picked = (routing.topk_experts_NK == E - 1).any()
    weights = [torch.eye(E, requires_grad=True)] * 2
    for _ in range(3000):  # a bias may move in small steps
        before = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
        balancing.update(balancing.measure([routing, routing]), 1, weights, 0.1, 0)
        moved = any(not torch.equal(before[name], tensor) for name, tensor in strategy.state_dict().items())
        if picked or not (moved and balancing.steers):
            break  # from the same state it chooses the same ever after
        routing = route(logits_NE.detach(), identity_EE.detach(), case, strategy)
        picked = (routing.topk_experts_NK == E - 1).any()
    assert bool(raised or picked) == strategy.properties.revives_dead_experts


CHECKS: list[Callable[[Case], None]] = [
    says_what_it_is,
    its_gradient_reaches_the_router,
    it_is_linear_in_its_coefficient,
    a_loss_of_weights_looks_at_nothing_else_if_declared,
    layers_mix_only_if_declared,
    a_dead_expert_is_drawn_in_as_declared,
]

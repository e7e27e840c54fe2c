"""What every strategy promises, one function for each promise; each raises AssertionError if it is broken."""

from dataclasses import replace

import torch

from simbal.balancing.base import Properties
from simbal.balancing.composition import Composition
from simbal.model.router import Router, Routing
from tests.balancing.cases import SIZES, Case
from tests.balancing.tiny_training import batch_of, module_of, outcome, recompute, same, state, tiny_module, train

E, K, D = SIZES["num_experts"], 2, 16
RELABELLED = torch.tensor([3, 0, 5, 1, 4, 2])
TOKENS_BS = torch.arange(24).view(2, 12)


def route(x_ND, weight_ED, case: Case, strategy) -> Routing:
    """One layer's routing, in the dtype of the weight."""
    router = Router(weight_ED.shape[1], len(weight_ED), K, case.gating, renormalize=True, layer=0)
    del router.weight_ED
    router.weight_ED = weight_ED
    return router(x_ND, TOKENS_BS, Composition({"it": strategy}, {}))


def losses(strategy, routings) -> torch.Tensor:
    return strategy.losses(routings, strategy.measure(routings) if strategy.foresees else None)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def says_what_it_is(case: Case) -> None:
    strategy = case.make()
    assert isinstance(getattr(strategy, "properties", None), Properties), "declares no properties"
    assert strategy.formula
    assert strategy.citation


def its_gradient_reaches_the_router(case: Case) -> None:
    strategy, x_ND = case.make(), random(24, D)
    weights = [random(E, D, seed=layer + 1).mul_(0.5).requires_grad_() for layer in range(2)]

    def total() -> torch.Tensor:
        return losses(strategy, [route(x_ND, weight_ED, case, strategy) for weight_ED in weights]).sum()

    value = total()
    if not strategy.properties.differentiable:
        assert value == 0
        return
    gradients = torch.autograd.grad(value, weights)
    with torch.no_grad():
        for weight_ED, gradient_ED in zip(weights, gradients, strict=True):
            assert gradient_ED.norm() > 1e-6, "no gradient"
            direction_ED = random(E, D, seed=9)
            central = []
            for sign in (1, -1):
                weight_ED.add_(direction_ED, alpha=sign * 1e-6)
                central.append(total())
                weight_ED.sub_(direction_ED, alpha=sign * 1e-6)
            slope = (central[0] - central[1]) / 2e-6
            torch.testing.assert_close((gradient_ED * direction_ED).sum(), slope, rtol=1e-5, atol=1e-7)


def its_loss_is_part_of_the_training_loss(case: Case) -> None:
    strategy = case.make()
    module, window_BT = module_of(strategy, case.gating), batch_of(0)
    _, routings = module.model(window_BT[:, :-1], module.balancing)
    declared_L = losses(strategy, routings)
    step = module.training_step(window_BT, 0)
    torch.testing.assert_close(
        step["loss"] - step["ce"], declared_L.mean() if strategy.over_layers == "mean" else declared_L.sum(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def its_values_at_uniform_and_collapsed_routing_are_as_declared(case: Case) -> None:
    strategy, scale = case.make(), 20.0
    turn = torch.arange(24)[:, None] + torch.arange(K)  # every expert is chosen equally often
    nudge_NE = torch.zeros(24, E, dtype=torch.float64).scatter_(1, turn % E, 1e-9)
    collapsed_NE = nudge_NE + scale * torch.tensor([1.0] + [-1.0] * (E - 1), dtype=torch.float64)
    rows_ED = torch.zeros(E, D, dtype=torch.float64)
    parallel_ED = rows_ED.clone()
    parallel_ED[:, 0] = collapsed_NE[0].sign() * scale
    for logits_NE, weight_ED, declared in (
        (nudge_NE, rows_ED, strategy.at_uniform(E, K)),
        (collapsed_NE, parallel_ED, strategy.at_collapse(E, K, scale)),
    ):
        router = Router(E, E, K, case.gating, True, layer=0).double()
        torch.nn.init.eye_(router.weight_ED)
        routing = replace(router(logits_NE, TOKENS_BS), router_weight_ED=weight_ED)
        for value in losses(strategy, [routing, routing]):
            torch.testing.assert_close(value, torch.tensor(declared, dtype=value.dtype), rtol=1e-5, atol=1e-6)


def it_is_linear_in_its_coefficient(case: Case) -> None:
    strategy = case.make()
    if not strategy.properties.differentiable:
        return
    routing = route(random(24, D), random(E, D, seed=1), case, strategy)
    values = []
    for strategy.coef in (1.0, 3.0, 0.0):
        values.append(losses(strategy, [routing, routing]))
    torch.testing.assert_close(values[1], 3 * values[0])
    assert (values[2] == 0).all()


def layers_mix_only_if_declared(case: Case) -> None:
    strategy = case.make()
    first, second, third = (route(random(24, D), random(E, D, seed=seed), case, strategy) for seed in (1, 2, 3))
    apart = torch.equal(losses(strategy, [first, second])[0], losses(strategy, [first, third])[0])
    assert apart != strategy.properties.mixes_layers


def the_cut_into_micro_batches_matters_only_if_declared(case: Case) -> None:
    whole, cut = tiny_module(case), tiny_module(case)
    train(whole, range(3))
    train(cut, range(3), micro_batches=4)
    assert same(outcome(whole), outcome(cut)) != (case.make().properties.scope == "micro")


def activation_checkpointing_changes_nothing(case: Case) -> None:
    plain, recomputed = tiny_module(case), tiny_module(case)
    recompute(recomputed)
    for module in (plain, recomputed):
        train(module, range(2), micro_batches=2)
    assert same(outcome(plain), outcome(recomputed), exactly=True)


def evaluation_has_no_effect(case: Case) -> None:
    strategy = case.make()
    module = module_of(strategy, case.gating)
    train(module, range(2))
    module.eval()
    before, losses_seen = state(module), []
    for strategy.coef in (0.0, 10.0):
        module.on_validation_epoch_start()
        module.validation_step(batch_of(7), 0)
        losses_seen.append(module.totals.nats)
    assert same(before, state(module), exactly=True)
    assert losses_seen[0] == losses_seen[1]


def its_state_survives_a_checkpoint(case: Case) -> None:
    module, restored = tiny_module(case), tiny_module(case)
    train(module, range(2))
    restored.load_state_dict(module.state_dict())
    for each in (module, restored):
        train(each, range(2, 4))
    assert same(outcome(module), outcome(restored), exactly=True)


def its_state_stays_fp32(case: Case) -> None:
    module = tiny_module(case)
    train(module, range(2))
    before = state(module)
    module.bfloat16()
    assert {tensor.dtype for tensor in state(module).values()} <= {torch.float32, torch.int64}
    assert same(before, state(module), exactly=True)


def instances_share_nothing(case: Case) -> None:
    alone, first, second = (tiny_module(case) for _ in range(3))
    train(alone, range(3))
    for step in range(3):
        train(first, range(step, step + 1))
        train(second, range(step + 3, step + 4))
    assert same(outcome(alone), outcome(first), exactly=True)


def choices_look_ahead_only_if_declared(case: Case) -> None:
    module = tiny_module(case)
    train(module, range(2))
    tokens_BS = batch_of(5)[:, :-1]
    changed_BS = tokens_BS.clone()
    changed_BS[-1, -1] = (changed_BS[-1, -1] + 1) % 32
    with torch.no_grad():
        pairs = zip(*(module.model(ids_BS, module.balancing)[1] for ids_BS in (tokens_BS, changed_BS)), strict=True)
        blind = all(torch.equal(a.topk_experts_NK[:-1], b.topk_experts_NK[:-1]) for a, b in pairs)
    assert blind == case.make().properties.causal


def relabelling_experts_relabels_the_choice_if_declared(case: Case) -> None:
    order, plain, relabelled = RELABELLED, tiny_module(case), tiny_module(case)
    for module in (plain, relabelled):
        train(module, range(1))
    with torch.no_grad():
        for layer in relabelled.model.feed_forwards:
            for experts in (layer.w13_E2FD, layer.w2_EFD):
                experts.copy_(experts[order])
            relabelled_ED = layer.router.weight_ED[order]
            if "weight_ED" in dict(layer.router.named_parameters()):
                layer.router.weight_ED.copy_(relabelled_ED)
            else:
                layer.router.weight_ED = relabelled_ED  # parametrised: computed back into its parameter
    relabelled.balancing.load_state_dict(
        {name: tensor[..., order] if tensor.shape[-1:] == (E,) else tensor for name, tensor in state(plain).items()}
    )
    steps = [train(module, range(1, 2))[0] for module in (plain, relabelled)]
    totals = [sum(step["aux"].values(), torch.tensor(0.0)) for step in steps]
    counts = torch.equal(plain.finished_counts_LE[:, order], relabelled.finished_counts_LE)
    assert (counts and torch.allclose(*totals, rtol=1e-4)) == case.make().properties.equivariant


def a_dead_expert_is_drawn_in_as_declared(case: Case) -> None:
    strategy = case.make()
    logits_NE = random(24, E)
    logits_NE[:, -1] = logits_NE.min() - 1
    logits_NE.requires_grad_()
    identity_EE = torch.eye(E, dtype=torch.float64, requires_grad=True)
    balancing = Composition({"it": strategy}, {})
    routing = route(logits_NE, identity_EE, case, strategy)
    (gradient_NE,) = torch.autograd.grad(losses(strategy, [routing, routing]).sum() + 0 * logits_NE.sum(), logits_NE)
    raised = gradient_NE[:, -1].mean() < -1e-9
    picked = (routing.topk_experts_NK == E - 1).any()
    weights = [torch.eye(E, requires_grad=True)] * 2
    balancing.update(balancing.measure([routing, routing]), 1, weights, 0.1, 0)
    picked_later = False
    for _ in range(3000):  # a bias may move in small steps
        routing = route(logits_NE.detach(), identity_EE.detach(), case, strategy)
        picked_later = picked_later or bool((routing.topk_experts_NK == E - 1).any())
        if picked_later:
            break
        balancing.update(balancing.measure([routing, routing]), 1, weights, 0.1, 0)
    assert bool(raised or picked or picked_later) == strategy.properties.revives_dead_experts


CHECKS = [
    says_what_it_is,
    its_gradient_reaches_the_router,
    its_loss_is_part_of_the_training_loss,
    its_values_at_uniform_and_collapsed_routing_are_as_declared,
    it_is_linear_in_its_coefficient,
    layers_mix_only_if_declared,
    the_cut_into_micro_batches_matters_only_if_declared,
    activation_checkpointing_changes_nothing,
    evaluation_has_no_effect,
    its_state_survives_a_checkpoint,
    its_state_stays_fp32,
    instances_share_nothing,
    choices_look_ahead_only_if_declared,
    relabelling_experts_relabels_the_choice_if_declared,
    a_dead_expert_is_drawn_in_as_declared,
]

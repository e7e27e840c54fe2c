"""The conformance suite: checks that hold a strategy to what it declares, for a test of your own too.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("case", cases_of_file(Path("conf/balancing/mine.yaml")), ids=str)
    def test_it_keeps_what_it_declares(case, check):
        check(case)

Each check raises AssertionError if a promise is broken, or one that is declared broken is not. First come the checks of
the loss and the choices on hand-made routings, then of the experts chosen, above all where they are ragged, and last
of a few optimizer steps of a tiny model: whole, in micro-batches, over ranks, recomputed.
Shapes: B sequences, S sequence length, N = B*S tokens, V vocabulary, D model width, E experts, K experts per token, F
width of an expert.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from torch.utils.checkpoint import checkpoint

from simbal.balancing.base import Balancing, Properties
from simbal.balancing.composition import Composition, build_strategy
from simbal.config.schema import OptimConfig
from simbal.data.loader import ValidationBatch
from simbal.distributed import sum_over_ranks, world_size
from simbal.model.init import initialise
from simbal.model.router import ExpertWeights, Router, Routing
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.module import LitMoE, StepResult

SIZES = {"num_layers": 2, "num_experts": 6}
FACTS = {**SIZES, "seed": 0}
NO_CHANGE: Mapping[str, Any] = {}
E, K, D, F = SIZES["num_experts"], 2, 16, 3
TOKENS_BS = torch.arange(24).view(2, 12)
PREFIX = 5  # tokens of each sequence
B, S, V = 4, 8, 32
LR = 0.1
RELABELLED = torch.tensor([3, 0, 5, 1, 4, 2])


@dataclass(frozen=True)
class Case:
    """A strategy and how to make a new one of it."""

    name: str
    make: Callable[[], Balancing]
    gating: str = "softmax"

    @property
    def renormalize(self) -> bool:
        """Whether weights are divided by their sum: not those of relu, which stay as they are."""
        return self.gating != "relu"

    def __str__(self) -> str:
        return f"{self.name}-{self.gating}"


def cases_of(name: str, keys: Mapping[str, Any], changes: Mapping[str, Any] = NO_CHANGE) -> list[Case]:
    """Return a strategy under the gatings that it takes, or the first if it looks at weights alone.

    Args:
        name: the strategy's.
        keys: those of its YAML file, `_target_` among them.
        changes: other values for some of the keys, which the cases bear in their names.
    """
    label = ",".join([name, *(f"{key}={value}" for key, value in changes.items())])
    make = partial(build_strategy, name, {**keys, **changes}, FACTS)
    strategy = make()
    gatings = strategy.gatings[:1] if strategy.properties.scope == "weights" else strategy.gatings
    return [Case(label, make, gating) for gating in gatings]


def cases_of_file(file: Path) -> list[Case]:
    """Return every strategy of a YAML file such as conf/balancing/mine.yaml, at its defaults."""
    strategies = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [case for name, keys in strategies.items() if name != "defaults" for case in cases_of(name, keys)]


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


def routed(case: Case, strategy: Balancing, logits_NE: Tensor, tokens_BS: Tensor = TOKENS_BS) -> Routing:
    """Return the routing by fp64 logits as they are."""
    router = Router(E, E, K, case.gating, case.renormalize, layer=0).double()
    torch.nn.init.eye_(router.weight_ED)
    router.keeps_input = True
    routing: Routing = router(logits_NE, tokens_BS, Composition({"it": strategy}, {}))
    return routing


def trained(case: Case) -> Balancing:
    """Return the strategy after two steps on random logits."""
    strategy = case.make()
    for seed in (1, 2):
        routings = [routed(case, strategy, random(24, E, seed=seed))] * 2
        balancing = Composition({"it": strategy}, {})
        balancing.update(balancing.measure(routings), 1, [torch.eye(E, requires_grad=True)] * 2, 0.1, 0)
    return strategy


def a_prefix_is_routed_as_in_the_whole(case: Case) -> None:
    """Check that nothing of a token depends on those after it: in evaluation, and in training if it is causal."""
    strategy, logits_NE = trained(case), random(24, E, seed=3)
    beginning = torch.arange(24).view_as(TOKENS_BS)[:, :PREFIX].flatten()
    for training in (False, True) if strategy.properties.causal else (False,):
        strategy.train(training)
        whole = routed(case, strategy, logits_NE)
        prefix = routed(case, strategy, logits_NE[beginning], TOKENS_BS[:, :PREFIX])
        assert torch.equal(whole.topk_experts_NK[beginning], prefix.topk_experts_NK)
        assert torch.equal(whole.topk_probs_NK[beginning], prefix.topk_probs_NK)


def weights_are_those_of_the_chosen(case: Case) -> None:
    """Check each weight against the probabilities: by their sum over the chosen, dropped ones included, or as it is."""
    for mode in (True, False):
        strategy = trained(case).train(mode)
        routing = routed(case, strategy, random(24, E, seed=3))
        scores_NE = torch.zeros(24, E + 1, dtype=torch.float64)
        scores_NE[:, :E] = routing.probs_NE
        among_NK = routing.unsteered_experts_NK if strategy.ragged and strategy.drops else routing.topk_experts_NK
        if case.renormalize:
            scores_NE /= scores_NE.gather(1, among_NK).sum(1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(routing.topk_probs_NK, scores_NE.gather(1, routing.topk_experts_NK))


def tiny_model(gating: str = "softmax") -> Transformer:
    """Return a model of two layers and six experts, the same at every call."""
    shape = TransformerShape(
        vocab_size=V, d_model=16, num_heads=2, d_expert=8, top_k=2, rope_theta=1e4, norm_eps=1e-5, gating=gating,
        renormalize=gating != "relu", num_layers=SIZES["num_layers"], num_experts=SIZES["num_experts"],
    )  # fmt: skip
    model = Transformer(shape, "torch")
    initialise(model, seed=0, std=0.3, router_init="normal")
    return model


def tiny_module(case: Case) -> LitMoE:
    """Return `case` at a coefficient that shows, on a model whose routers start away from every optimum."""
    return module_of(case.make(), case.gating)


def module_of(strategy: Balancing, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with a strategy, at a coefficient of 1 if it has one."""
    if strategy.coef:
        strategy.coef = 1.0
    return composed_module(Composition({"it": strategy}, {}), gating)


def composed_module(balancing: Composition, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with strategies as they are."""
    model = tiny_model(gating)
    balancing.prepare(model.routers)
    optim = OptimConfig(
        lr=LR,
        weight_decay=0.0,
        betas=[0.9, 0.95],
        eps=1e-8,
        decay_router=True,
        warmup_steps=0,
        z_loss_coef=0.0,
        grad_clip=0.0,
        aux_layer_reduce="sum",
    )
    return LitMoE(model, balancing, optim, 100, torch.ones(V, dtype=torch.int64))


def batch_of(step: int) -> Tensor:
    """Return the windows of tokens of a step, the same at every call."""
    return torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(step))


def recompute(module: LitMoE) -> None:
    """Forget each block's activations and compute them again for the backward pass."""
    for block in module.model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


def train(module: LitMoE, steps: range, micro_batches: int = 1, rank: int = 0) -> list[StepResult]:
    """Train by SGD; each rank, and each micro-batch, takes every so-many-th sequence."""
    optimizer = torch.optim.SGD(module.model.parameters(), LR)
    finished = []
    for step in steps:
        mine_BT = batch_of(step)[rank :: world_size()]
        chunks = [mine_BT[first::micro_batches] for first in range(micro_batches)]
        if module.balancing.needs_step_counts and micro_batches > 1:
            module.count_step(chunks)
        for chunk_BT in chunks:
            (module.training_step(chunk_BT, 0)["loss"] / micro_batches).backward()
        if world_size() > 1:
            average_gradients(module)
        optimizer.step()
        optimizer.zero_grad()
        finished.append(module.finish_step(step, LR))
    return finished


def average_gradients(module: LitMoE) -> None:
    """Give every rank the mean of the gradients of all."""
    gradients = [parameter.grad for parameter in module.model.parameters() if parameter.grad is not None]
    total = sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, mean in zip(gradients, torch.split(total, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient) / world_size())


def outcome(module: LitMoE) -> dict[str, Tensor]:
    """Return the routers' weights and the strategies' state."""
    weights = {f"router.{i}": router.weight_ED.detach() for i, router in enumerate(module.model.routers)}
    return {**weights, **state(module)}


def state(module: LitMoE) -> dict[str, Tensor]:
    """Return a copy of the strategies' state."""
    return {name: tensor.clone() for name, tensor in module.balancing.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor], exactly: bool = False) -> bool:
    """Whether two outcomes are equal: to the last bit if `exactly`, else to rounding."""
    assert first.keys() == second.keys()
    pairs = [(first[key], second[key]) for key in first]
    if exactly:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5) for a, b in pairs)


def its_loss_is_part_of_the_training_loss(case: Case) -> None:
    """Check that a training step adds its loss, as declared over layers."""
    strategy = case.make()
    module, window_BT = module_of(strategy, case.gating), batch_of(0)
    _, routings = module.model(window_BT[:, :-1], module.balancing)
    declared_L = losses(strategy, routings)
    step = module.training_step(window_BT, 0)
    torch.testing.assert_close(
        step["loss"] - step["ce"], declared_L.mean() if strategy.over_layers == "mean" else declared_L.sum(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def the_cut_into_micro_batches_matters_only_if_declared(case: Case) -> None:
    """Check that four micro-batches train as one does, unless its scope is micro."""
    whole, cut = tiny_module(case), tiny_module(case)
    train(whole, range(2))
    train(cut, range(2), micro_batches=4)
    assert same(outcome(whole), outcome(cut)) != (case.make().properties.scope == "micro")


def activation_checkpointing_changes_nothing(case: Case) -> None:
    """Check that computing activations twice trains to the same bits."""
    plain, recomputed = tiny_module(case), tiny_module(case)
    recompute(recomputed)
    for module in (plain, recomputed):
        train(module, range(2), micro_batches=2)
    assert same(outcome(plain), outcome(recomputed), exactly=True)


def evaluation_has_no_effect(case: Case) -> None:
    """Check that validation changes no state, and that its coefficient changes no validation."""
    strategy = case.make()
    module = module_of(strategy, case.gating)
    train(module, range(2))
    module.eval()
    before, losses_seen, window_BT = state(module), [], batch_of(7)
    for strategy.coef in (0.0, 10.0):
        module.on_validation_epoch_start()
        module.validation_step(ValidationBatch(window_BT, torch.zeros_like(window_BT[:, 1:])), 0)
        losses_seen.append(module.totals.nats)
    assert same(before, state(module), exactly=True)
    assert losses_seen[0] == losses_seen[1]


def its_state_survives_a_checkpoint(case: Case) -> None:
    """Check that training goes on from a saved state to the same bits."""
    module, restored = tiny_module(case), tiny_module(case)
    train(module, range(2))
    restored.load_state_dict(module.state_dict())
    for each in (module, restored):
        train(each, range(2, 3))
    assert same(outcome(module), outcome(restored), exactly=True)


def its_state_stays_fp32(case: Case) -> None:
    """Check that a cast of the model to bf16 leaves its state as it is."""
    module = tiny_module(case)
    train(module, range(2))
    before = state(module)
    module.bfloat16()
    assert {tensor.dtype for tensor in state(module).values()} <= {torch.float32, torch.int64}
    assert same(before, state(module), exactly=True)


def instances_share_nothing(case: Case) -> None:
    """Check that two strategies that train in turns do not see each other."""
    alone, first, second = (tiny_module(case) for _ in range(3))
    train(alone, range(2))
    for step in range(2):
        train(first, range(step, step + 1))
        train(second, range(step + 3, step + 4))
    assert same(outcome(alone), outcome(first), exactly=True)


def choices_look_ahead_only_if_declared(case: Case) -> None:
    """Check whether the last token changes the experts of those before it."""
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
    """Check whether experts in another order are chosen and weighed in that order."""
    order, plain, relabelled = RELABELLED, tiny_module(case), tiny_module(case)
    for module in (plain, relabelled):
        train(module, range(1))
    with torch.no_grad():
        layers: Iterable[Any] = relabelled.model.feed_forwards
        for layer in layers:
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
    terms = [[part for name, part in step.losses[0].items() if name.startswith("aux/")] for step in steps]
    first, second = (sum(parts, torch.tensor(0.0)) for parts in terms)
    plain_LE, relabelled_LE = (step.counts_LE for step in steps)
    assert plain_LE is not None
    assert relabelled_LE is not None
    counts = torch.equal(plain_LE[:, order], relabelled_LE)
    assert (counts and torch.allclose(first, second, rtol=1e-4)) == case.make().properties.equivariant


CHECKS: list[Callable[[Case], None]] = [
    says_what_it_is,
    its_gradient_reaches_the_router,
    it_is_linear_in_its_coefficient,
    a_loss_of_weights_looks_at_nothing_else_if_declared,
    layers_mix_only_if_declared,
    a_dead_expert_is_drawn_in_as_declared,
    a_prefix_is_routed_as_in_the_whole,
    weights_are_those_of_the_chosen,
    its_loss_is_part_of_the_training_loss,
    the_cut_into_micro_batches_matters_only_if_declared,
    activation_checkpointing_changes_nothing,
    evaluation_has_no_effect,
    its_state_survives_a_checkpoint,
    its_state_stays_fp32,
    instances_share_nothing,
    choices_look_ahead_only_if_declared,
    relabelling_experts_relabels_the_choice_if_declared,
]

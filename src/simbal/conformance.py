"""The conformance suite: checks that a balancing strategy behaves as declared. Use it to test your own strategy:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("case", cases_of_file(Path("conf/balancing/mine.yaml")), ids=str)
    def test_it_keeps_what_it_declares(case, check):
        check(case)

A check raises AssertionError if the strategy does not behave as declared. That includes a property that is declared
False but holds. The checks first look at the loss and the choices on synthetic routings, then at the chosen experts and
their gate weights, and finally train a tiny model for a few steps: with micro-batches, on several ranks, and with
activation checkpointing.
Shapes: B sequences, S sequence length, N = B*S tokens, V vocabulary, D model width, E experts, K experts per token, F
expert width.
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
from simbal.model.init import initialize
from simbal.model.router import ExpertWeights, Router, Routing
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.module import LitMoE, StepResult

SIZES = {"num_layers": 2, "num_experts": 6}
FACTS = {**SIZES, "seed": 0}
E, K, D, F = SIZES["num_experts"], 2, 16, 3
B, S, V = 4, 8, 32
TOKENS_BS = torch.arange(24).view(2, 12)
PREFIX = 5  # tokens of each sequence
LR = 0.1
PERMUTATION = torch.tensor([3, 0, 5, 1, 4, 2])  # of the experts


@dataclass(frozen=True)
class Case:
    """A strategy to check, under one gating."""

    name: str
    make: Callable[[], Balancing]  # returns a new instance
    gating: str = "softmax"

    @property
    def renormalize(self) -> bool:
        """Whether weights are divided by their sum, as for every gating except relu."""
        return self.gating != "relu"

    def __str__(self) -> str:
        return f"{self.name}-{self.gating}"


def cases_of(name: str, keys: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> list[Case]:
    """Return a case for each gating of a strategy, or only for the first one if the strategy reads only router weights.

    Args:
        name: name of the strategy.
        keys: keys of the strategy in a YAML file, including `_target_`.
        changes: values that override some keys and become part of the case's name.
    """
    changes = changes or {}
    label = ",".join([name, *(f"{key}={value}" for key, value in changes.items())])
    make = partial(build_strategy, name, {**keys, **changes}, FACTS)
    strategy = make()
    gatings = strategy.gatings[:1] if strategy.properties.scope == "weights" else strategy.gatings
    return [Case(label, make, gating) for gating in gatings]


def cases_of_file(file: Path) -> list[Case]:
    """Return the cases of all strategies in a YAML file such as conf/balancing/mine.yaml, with its default values."""
    strategies = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [case for name, keys in strategies.items() if name != "defaults" for case in cases_of(name, keys)]


def route(
    x_ND: Tensor,
    weight_ED: Tensor,
    case: Case,
    strategy: Balancing,
    experts: ExpertWeights | None = None,
    tokens_BS: Tensor = TOKENS_BS,
) -> Routing:
    """Return the routing of one layer, in the dtype of the weight; None: random experts."""
    router = Router(weight_ED.shape[1], len(weight_ED), K, case.gating, case.renormalize, layer=0)
    del router.weight_ED
    router.weight_ED = weight_ED  # type: ignore[assignment]  # replaces the parameter
    router.keeps_input = True
    routing: Routing = router(x_ND, tokens_BS, Composition({"it": strategy}, {}))
    return replace(routing, experts=random_experts(weight_ED.shape[1]) if experts is None else experts)


def route_logits(logits_NE: Tensor, case: Case, strategy: Balancing, tokens_BS: Tensor = TOKENS_BS) -> Routing:
    """Return the routing for given logits, in fp64."""
    return route(logits_NE, torch.eye(E, dtype=torch.float64), case, strategy, tokens_BS=tokens_BS)


def losses(strategy: Balancing, routings: Sequence[Routing]) -> Tensor:
    """Return the strategy's loss of each layer, for a step with one micro-batch."""
    return strategy.losses(routings, strategy.measure(routings) if strategy.needs_step_counts else None)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers in fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_experts(d_model: int, seed: int = 0) -> ExpertWeights:
    """Return experts with normally distributed weights."""
    return ExpertWeights(random(E, 2, F, d_model, seed=seed), random(E, F, d_model, seed=seed + 1))


def it_declares_properties_formula_and_citation(case: Case) -> None:
    """Check that the strategy declares its properties, its formula and its source."""
    strategy = case.make()
    assert isinstance(getattr(strategy, "properties", None), Properties), "declare `properties`"
    assert strategy.formula, "declare `formula`"
    assert strategy.citation, "declare `citation`"


def its_gradient_reaches_the_router(case: Case) -> None:
    """Check the gradients of each router, and of the experts if the loss reads them, against central differences.

    The loss of a strategy with differentiable=False must be 0.
    """
    strategy, x_ND = case.make(), random(24, D)
    weights = [random(E, D, seed=layer + 1).mul_(0.5).requires_grad_() for layer in range(2)]
    experts = [ExpertWeights(*(each.requires_grad_() for each in random_experts(D, seed))) for seed in (3, 5)]

    def total() -> Tensor:
        layers = zip(weights, experts, strict=True)
        return losses(strategy, [route(x_ND, weight_ED, case, strategy, each) for weight_ED, each in layers]).sum()

    if strategy.coef:
        strategy.coef = 1.0  # makes rounding errors small compared with the gradient
    value = total()
    if not strategy.properties.differentiable:
        assert value == 0, f"differentiable=False, but the loss is {value:.3g}"
        return
    for weight_ED, of_layer in zip(weights, experts, strict=True):
        inputs = [weight_ED, *(of_layer if strategy.needs_experts else ())]
        gradients = torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True)
        gradient, start = (torch.cat([each.detach().flatten() for each in tensors]) for tensors in (gradients, inputs))
        assert gradient.norm() > 1e-6, "differentiable=True, but the gradient is 0"
        direction, values = random(len(start), seed=9), []
        with torch.no_grad():
            for point in (start + 1e-6 * direction, start - 1e-6 * direction, start):
                vector_to_parameters(point, inputs)
                values.append(total())
        slope = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close(gradient @ direction, slope, rtol=1e-5, atol=1e-7)


def it_is_linear_in_its_coefficient(case: Case) -> None:
    """Check that the loss is proportional to `coef`, and 0 for coef=0."""
    strategy = case.make()
    if not strategy.properties.differentiable:
        return
    routing = route(random(24, D), random(E, D, seed=1), case, strategy)
    values = []
    for strategy.coef in (1.0, 3.0, 0.0):
        values.append(losses(strategy, [routing, routing]))
    torch.testing.assert_close(values[1], 3 * values[0])
    assert (values[2] == 0).all(), "the loss is not 0 for coef=0"


def its_loss_ignores_tokens_only_if_declared(case: Case) -> None:
    """Check that the loss depends only on router weights if scope=weights, and otherwise also on tokens or gating."""
    strategy = case.make()
    if not strategy.properties.differentiable:
        return
    weight_ED, values = random(E, D, seed=1), []
    for seed, gating in enumerate(("softmax", "sigmoid")):
        each = replace(case, gating=gating)
        values.append(losses(strategy, [route(random(24, D, seed=seed), weight_ED, each, strategy)] * 2))
    ignored, scope = torch.equal(*values), strategy.properties.scope
    assert ignored == (scope == "weights"), f"scope={scope}, but different tokens {_change(not ignored)} the loss"


def layers_mix_only_if_declared(case: Case) -> None:
    """Check whether the routing of one layer changes the loss of another."""
    strategy = case.make()
    first, second, third = (route(random(24, D), random(E, D, seed=seed), case, strategy) for seed in (1, 2, 3))
    mixed = not torch.equal(losses(strategy, [first, second])[0], losses(strategy, [first, third])[0])
    declared = strategy.properties.mixes_layers
    assert mixed == declared, f"mixes_layers={declared}, but other layers {_change(mixed)} the loss of a layer"


def dead_experts_revive_only_if_declared(case: Case) -> None:
    """Check whether the gradient raises the logits of an expert without tokens, or updates make tokens choose it."""
    strategy = case.make()
    logits_NE = 0.2 * random(24, E)  # close to each other, so that small steps of a bias change the choice
    logits_NE[:, -1] = logits_NE.min() - 0.2 - 0.1 * logits_NE[:, -1].abs()  # different, because thresholds need it
    logits_NE.requires_grad_()
    identity_EE = torch.eye(E, dtype=torch.float64, requires_grad=True)
    balancing = Composition({"it": strategy}, {})
    routing = route(logits_NE, identity_EE, case, strategy)
    (gradient_NE,) = torch.autograd.grad(losses(strategy, [routing, routing]).sum() + 0 * logits_NE.sum(), logits_NE)
    revived = bool(gradient_NE[:, -1].mean() < -1e-9 or (routing.topk_experts_NK == E - 1).any())
    weights = [torch.eye(E, requires_grad=True)] * 2
    for _ in range(3000):  # a bias may need many small steps
        before = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
        balancing.update(balancing.measure([routing, routing]), 1, weights, 0.1, 0)
        changed = any(not torch.equal(before[name], tensor) for name, tensor in strategy.state_dict().items())
        if revived or not (changed and balancing.steers):
            break  # further steps would repeat this one
        routing = route(logits_NE.detach(), identity_EE.detach(), case, strategy)
        revived = bool((routing.topk_experts_NK == E - 1).any())
    declared = strategy.properties.revives_dead_experts
    assert revived == declared, (
        f"revives_dead_experts={declared}, but a dead expert {'revives' if revived else 'stays'}"
    )


def updated(case: Case) -> Balancing:
    """Return the strategy after two updates on random logits."""
    strategy = case.make()
    for seed in (1, 2):
        routings = [route_logits(random(24, E, seed=seed), case, strategy)] * 2
        balancing = Composition({"it": strategy}, {})
        balancing.update(balancing.measure(routings), 1, [torch.eye(E, requires_grad=True)] * 2, 0.1, 0)
    return strategy


def a_prefix_is_routed_as_in_the_full_sequence(case: Case) -> None:
    """Check that later tokens do not affect earlier ones: in evaluation, and also in training if causal=True."""
    strategy, logits_NE = updated(case), random(24, E, seed=3)
    prefix_N = torch.arange(24).view_as(TOKENS_BS)[:, :PREFIX].flatten()
    for training in (False, True) if strategy.properties.causal else (False,):
        strategy.train(training)
        full = route_logits(logits_NE, case, strategy)
        prefix = route_logits(logits_NE[prefix_N], case, strategy, TOKENS_BS[:, :PREFIX])
        mode = "training" if training else "evaluation"
        assert torch.equal(full.topk_experts_NK[prefix_N], prefix.topk_experts_NK), f"experts differ in {mode}"
        assert torch.equal(full.topk_probs_NK[prefix_N], prefix.topk_probs_NK), f"weights differ in {mode}"


def weights_match_the_chosen_experts(case: Case) -> None:
    """Check that gate weights are the probabilities of the chosen experts, divided by their sum if the router does so.

    The sum includes dropped experts.
    """
    for mode in (True, False):
        strategy = updated(case).train(mode)
        routing = route_logits(random(24, E, seed=3), case, strategy)
        probs_NE = torch.zeros(24, E + 1, dtype=torch.float64)
        probs_NE[:, :E] = routing.probs_NE
        summed_NK = routing.unsteered_experts_NK if strategy.ragged and strategy.drops else routing.topk_experts_NK
        if case.renormalize:
            probs_NE /= probs_NE.gather(1, summed_NK).sum(1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(routing.topk_probs_NK, probs_NE.gather(1, routing.topk_experts_NK))


def tiny_model(gating: str = "softmax") -> Transformer:
    """Return a model with two layers and six experts, always with the same weights."""
    shape = TransformerShape(
        vocab_size=V, d_model=16, num_heads=2, d_expert=8, top_k=2, rope_theta=1e4, norm_eps=1e-5, gating=gating,
        renormalize=gating != "relu", num_layers=SIZES["num_layers"], num_experts=SIZES["num_experts"],
    )  # fmt: skip
    model = Transformer(shape, "torch")
    initialize(model, seed=0, std=0.3, router_init="normal")
    return model


def tiny_module(case: Case) -> LitMoE:
    """Return the tiny model with the case's strategy, with coef=1 if the strategy has a loss."""
    return module_of(case.make(), case.gating)


def module_of(strategy: Balancing, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with a strategy, with coef=1 if the strategy has a loss."""
    if strategy.coef:
        strategy.coef = 1.0
    return composed_module(Composition({"it": strategy}, {}), gating)


def composed_module(balancing: Composition, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with a composition of strategies."""
    model = tiny_model(gating)
    balancing.prepare(model.routers)
    optim = OptimConfig(
        lr=LR, weight_decay=0.0, betas=[0.9, 0.95], eps=1e-8, decay_router=True, warmup_steps=0, z_loss_coef=0.0,
        grad_clip=0.0, aux_layer_reduce="sum",
    )  # fmt: skip
    return LitMoE(model, balancing, optim, 100, torch.ones(V, dtype=torch.int64))


def batch_of(step: int) -> Tensor:
    """Return the token windows of a step, (B, S + 1)."""
    return torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(step))


def train(module: LitMoE, steps: range, micro_batches: int = 1, rank: int = 0) -> list[StepResult]:
    """Train with SGD. Sequences are distributed round-robin over ranks, and then over micro-batches."""
    optimizer = torch.optim.SGD(module.model.parameters(), LR)
    results = []
    for step in steps:
        of_rank_BT = batch_of(step)[rank :: world_size()]
        chunks = [of_rank_BT[first::micro_batches] for first in range(micro_batches)]
        if module.balancing.needs_step_counts and micro_batches > 1:
            module.count_step(chunks)
        for chunk_BT in chunks:
            (module.training_step(chunk_BT, 0)["loss"] / micro_batches).backward()
        if world_size() > 1:
            for parameter in module.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(sum_over_ranks(parameter.grad) / world_size())
        optimizer.step()
        optimizer.zero_grad()
        results.append(module.finish_step(step, LR))
    return results


def outcome(module: LitMoE) -> dict[str, Tensor]:
    """Return the routers' weights and the strategies' state."""
    weights = {f"router.{i}": router.weight_ED.detach() for i, router in enumerate(module.model.routers)}
    return {**weights, **state(module)}


def state(module: LitMoE) -> dict[str, Tensor]:
    """Return a copy of the strategies' state."""
    return {name: tensor.clone() for name, tensor in module.balancing.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor], exactly: bool = False) -> bool:
    """Return whether two outcomes are equal up to rounding, or bit by bit if `exactly`."""
    assert first.keys() == second.keys()
    pairs = [(first[key], second[key]) for key in first]
    if exactly:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5) for a, b in pairs)


def its_loss_is_part_of_the_training_loss(case: Case) -> None:
    """Check that a training step adds the strategy's loss, reduced over layers as declared."""
    strategy = case.make()
    module, window_BT = module_of(strategy, case.gating), batch_of(0)
    _, routings = module.model(window_BT[:, :-1], module.balancing)
    declared_L = losses(strategy, routings)
    expected = declared_L.mean() if strategy.over_layers == "mean" else declared_L.sum()
    step = module.training_step(window_BT, 0)
    torch.testing.assert_close(step["loss"] - step["ce"], expected, rtol=1e-4, atol=1e-5)


def micro_batches_matter_only_if_declared(case: Case) -> None:
    """Check that four micro-batches train to the same weights as one, unless scope=micro."""
    one, four = tiny_module(case), tiny_module(case)
    train(one, range(2))
    train(four, range(2), micro_batches=4)
    matter, scope = not same(outcome(one), outcome(four)), case.make().properties.scope
    assert matter == (scope == "micro"), f"scope={scope}, but micro-batches {_change(matter)} the result"


def activation_checkpointing_changes_nothing(case: Case) -> None:
    """Check that training with activation checkpointing is bit-identical."""
    plain, recomputed = tiny_module(case), tiny_module(case)
    for block in recomputed.model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for module in (plain, recomputed):
        train(module, range(2), micro_batches=2)
    assert same(outcome(plain), outcome(recomputed), exactly=True), "a second forward pass changes the result"


def evaluation_has_no_effect(case: Case) -> None:
    """Check that validation changes no state, and that the coefficient does not change the validation loss."""
    strategy = case.make()
    module = module_of(strategy, case.gating)
    train(module, range(2))
    module.eval()
    before, val_losses, window_BT = state(module), [], batch_of(7)
    for strategy.coef in (0.0, 10.0):
        module.on_validation_epoch_start()
        module.validation_step(ValidationBatch(window_BT, torch.zeros_like(window_BT[:, 1:])), 0)
        val_losses.append(module.totals.nats)
    assert same(before, state(module), exactly=True), "validation changes the strategy's state"
    assert val_losses[0] == val_losses[1], "coef changes the validation loss"


def its_state_survives_a_checkpoint(case: Case) -> None:
    """Check that training resumed from a state dict is bit-identical."""
    module, restored = tiny_module(case), tiny_module(case)
    train(module, range(2))
    restored.load_state_dict(module.state_dict())
    for each in (module, restored):
        train(each, range(2, 3))
    assert same(outcome(module), outcome(restored), exactly=True), "register all state as buffers"


def its_state_stays_fp32(case: Case) -> None:
    """Check that casting the model to bf16 does not change the strategy's state."""
    module = tiny_module(case)
    train(module, range(2))
    before = state(module)
    module.bfloat16()
    dtypes = {tensor.dtype for tensor in state(module).values()}
    assert dtypes <= {torch.float32, torch.int64}, f"the state is in {dtypes}"
    assert same(before, state(module), exactly=True), "a cast to bf16 changes the state"


def instances_share_nothing(case: Case) -> None:
    """Check that two instances of a strategy do not affect each other."""
    alone, first, second = (tiny_module(case) for _ in range(3))
    train(alone, range(2))
    for step in range(2):
        train(first, range(step, step + 1))
        train(second, range(step + 3, step + 4))
    assert same(outcome(alone), outcome(first), exactly=True), "another instance changes the result"


def choices_look_ahead_only_if_declared(case: Case) -> None:
    """Check whether the last token changes the experts of earlier tokens in training."""
    module = tiny_module(case)
    train(module, range(2))
    tokens_BS = batch_of(5)[:, :-1]
    changed_BS = tokens_BS.clone()
    changed_BS[-1, -1] = (changed_BS[-1, -1] + 1) % V
    with torch.no_grad():
        pairs = zip(*(module.model(ids_BS, module.balancing)[1] for ids_BS in (tokens_BS, changed_BS)), strict=True)
        causal = all(torch.equal(a.topk_experts_NK[:-1], b.topk_experts_NK[:-1]) for a, b in pairs)
    declared = case.make().properties.causal
    assert causal == declared, f"causal={declared}, but later tokens {_change(not causal)} earlier choices"


def relabeling_experts_relabels_the_choice_only_if_declared(case: Case) -> None:
    """Check whether permuted experts are chosen and weighted in the permuted order."""
    order, plain, relabeled = PERMUTATION, tiny_module(case), tiny_module(case)
    for module in (plain, relabeled):
        train(module, range(1))
    with torch.no_grad():
        layers: Iterable[Any] = relabeled.model.feed_forwards
        for layer in layers:
            for experts in (layer.w13_E2FD, layer.w2_EFD):
                experts.copy_(experts[order])
            permuted_ED = layer.router.weight_ED[order]
            if "weight_ED" in dict(layer.router.named_parameters()):
                layer.router.weight_ED.copy_(permuted_ED)
            else:
                layer.router.weight_ED = permuted_ED  # the parametrization computes its parameter
    relabeled.balancing.load_state_dict(
        {name: tensor[..., order] if tensor.shape[-1:] == (E,) else tensor for name, tensor in state(plain).items()}
    )
    steps = [train(module, range(1, 2))[0] for module in (plain, relabeled)]
    terms = [[part for name, part in step.losses[0].items() if name.startswith("aux/")] for step in steps]
    first, second = (sum(parts, torch.tensor(0.0)) for parts in terms)
    plain_LE, relabeled_LE = (step.counts_LE for step in steps)
    assert plain_LE is not None
    assert relabeled_LE is not None
    equivariant = torch.equal(plain_LE[:, order], relabeled_LE) and torch.allclose(first, second, rtol=1e-4)
    declared = case.make().properties.equivariant
    assert equivariant == declared, (
        f"equivariant={declared}, but labels of experts {_change(not equivariant)} the result"
    )


def _change(does: bool) -> str:
    return "change" if does else "do not change"


CHECKS: list[Callable[[Case], None]] = [
    it_declares_properties_formula_and_citation,
    its_gradient_reaches_the_router,
    it_is_linear_in_its_coefficient,
    its_loss_ignores_tokens_only_if_declared,
    layers_mix_only_if_declared,
    dead_experts_revive_only_if_declared,
    a_prefix_is_routed_as_in_the_full_sequence,
    weights_match_the_chosen_experts,
    its_loss_is_part_of_the_training_loss,
    micro_batches_matter_only_if_declared,
    activation_checkpointing_changes_nothing,
    evaluation_has_no_effect,
    its_state_survives_a_checkpoint,
    its_state_stays_fp32,
    instances_share_nothing,
    choices_look_ahead_only_if_declared,
    relabeling_experts_relabels_the_choice_only_if_declared,
]

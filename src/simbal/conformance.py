"""The conformance suite: checks that a balancing strategy behaves as declared. Use it to test your own strategy:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("case", cases_of_file(Path("conf/balancing/mine.yaml")), ids=str)
    def test_it_keeps_what_it_declares(case, check):
        check(case)

A check raises AssertionError if the strategy does not behave as declared, or GradcheckError for a wrong gradient. It
also fails if a property is declared False but holds. The first half of the checks looks at the loss, the chosen experts
and their gate weights on synthetic routings. The second half trains a tiny model for a few steps, also with
micro-batches and activation checkpointing.
Shapes: B sequences, S sequence length, N = B*S tokens, V vocabulary, D model width, E experts, K experts per token, F
expert width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from simbal.balancing.base import Balancing, Properties
from simbal.balancing.composition import Composition, build_strategy
from simbal.config.schema import OptimConfig
from simbal.data.loader import ValidationBatch
from simbal.model.init import initialize
from simbal.model.router import ExpertWeights, Router, Routing
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.module import LitMoE, StepResult

SIZES = {"num_layers": 2, "num_experts": 6}
E, K, D, F = SIZES["num_experts"], 2, 16, 3
B, S, V = 4, 8, 32
FACTS = {**SIZES, "vocab_size": V, "seed": 0, "end_of_text": 3, "token_counts": lambda: torch.arange(V)}
TOKENS_BS = torch.arange(24).view(2, 12)
PREFIX = 5  # tokens of each sequence
LR = 0.1


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


def cases_of(name: str, keys: Mapping[str, Any]) -> list[Case]:
    """Return a case for each gating of a strategy, or only for the first one if the strategy reads only router weights.

    `keys` are the keys of the strategy in a YAML file, including `_target_`.
    """
    make = partial(build_strategy, name, keys, FACTS)
    strategy = make()
    gatings = strategy.gatings[:1] if strategy.properties.scope == "weights" else strategy.gatings
    return [Case(name, make, gating) for gating in gatings]


def cases_of_file(file: Path) -> list[Case]:
    """Return the cases of all strategies in a YAML file such as conf/balancing/mine.yaml, with its default values."""
    strategies = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [case for name, keys in strategies.items() if name != "defaults" for case in cases_of(name, keys)]


def route(x_ND: Tensor, weight_ED: Tensor, case: Case, strategy: Balancing, tokens_BS: Tensor = TOKENS_BS) -> Routing:
    """Return the routing of one layer with random experts, in the dtype of the weight."""
    router = Router(weight_ED.shape[1], len(weight_ED), K, case.gating, case.renormalize, layer=0)
    routing = router.route(x_ND, weight_ED, tokens_BS, Composition({"it": strategy}, {}))
    return replace(routing, x_ND=x_ND.detach(), experts=random_experts(weight_ED.shape[1]))


def route_logits(logits_NE: Tensor, case: Case, strategy: Balancing, tokens_BS: Tensor = TOKENS_BS) -> Routing:
    """Return the routing for given logits, in fp64."""
    return route(logits_NE, torch.eye(E, dtype=torch.float64), case, strategy, tokens_BS)


def losses(strategy: Balancing, routings: Sequence[Routing]) -> Tensor:
    """Return the strategy's loss of each layer, for a step with one micro-batch."""
    return strategy.losses(routings, strategy.measure(routings) if strategy.needs_step_counts else None)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers in fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_experts(d_model: int, seed: int = 0) -> ExpertWeights:
    """Return experts with normally distributed weights."""
    return ExpertWeights(random(E, 2, F, d_model, seed=seed), random(E, F, d_model, seed=seed + 1))


def require_declared(strategy: Balancing, name: str, found: bool) -> None:
    """Raise AssertionError unless the property `name` is declared as the check finds it."""
    declared = getattr(strategy.properties, name)
    assert declared == found, f"{name}={declared} is declared, but the check finds {name}={found}"


# Checks on synthetic routings


def it_declares_properties_formula_and_citation(case: Case) -> None:
    """Check that the strategy declares its properties, its formula and its source."""
    strategy = case.make()
    assert isinstance(getattr(strategy, "properties", None), Properties), "declare `properties`"
    assert all([strategy.formula, strategy.citation]), "declare `formula` and `citation`"


def its_gradient_reaches_the_router(case: Case) -> None:
    """Check the gradients of each router, and of the experts if the loss reads them, against central differences.

    The loss of a strategy with differentiable=False must be 0.
    """
    strategy, x_ND = case.make(), random(24, D)
    if strategy.coef:
        strategy.coef = 1.0  # makes rounding errors small compared with the gradient

    def total(*tensors: Tensor) -> Tensor:  # of two layers: the router's weight, gate and up, down
        layers = tensors[:3], tensors[3:]
        routings = [
            replace(route(x_ND, weight_ED, case, strategy), experts=ExpertWeights(w13_E2FD, w2_EFD))
            for weight_ED, w13_E2FD, w2_EFD in layers
        ]
        return losses(strategy, routings).sum()

    tensors = [random(E, D, seed=1) / 2, *random_experts(D, 3), random(E, D, seed=2) / 2, *random_experts(D, 5)]
    value = total(*(tensor.requires_grad_() for tensor in tensors))
    if not strategy.properties.differentiable:
        assert value == 0, f"differentiable=False, but the loss is {value:.3g}"
        return
    norms = [gradient.norm() for gradient in torch.autograd.grad(value, tensors, materialize_grads=True)]
    assert min(max(norms[:3]), max(norms[3:])) > 1e-6, "differentiable=True, but the gradient of a layer is 0"
    torch.autograd.gradcheck(total, tensors, atol=1e-7, rtol=1e-5, check_undefined_grad=False, fast_mode=True)


def it_is_linear_in_its_coefficient(case: Case) -> None:
    """Check that the loss is proportional to `coef`, and 0 for coef=0."""
    strategy = case.make()
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
    for seed, each in enumerate(replace(case, gating=gating) for gating in ("softmax", "sigmoid")):
        values.append(losses(strategy, [route(random(24, D, seed=seed), weight_ED, each, strategy)] * 2))
    equal, scope = torch.equal(*values), strategy.properties.scope
    assert equal == (scope == "weights"), f"scope={scope}, but the losses of different tokens are equal: {equal}"


def layers_mix_only_if_declared(case: Case) -> None:
    """Check whether the routing of one layer changes the loss of another."""
    strategy = case.make()
    first, second, third = (route(random(24, D), random(E, D, seed=seed), case, strategy) for seed in (1, 2, 3))
    mixed = not torch.equal(losses(strategy, [first, second])[0], losses(strategy, [first, third])[0])
    require_declared(strategy, "mixes_layers", mixed)


def dead_experts_revive_only_if_declared(case: Case) -> None:
    """Check whether the gradient raises the logits of an expert without tokens, or updates make tokens choose it."""
    strategy = case.make()
    logits_NE = 0.2 * random(24, E)  # close to each other, so that small steps of a bias change the choice
    logits_NE[:, -1] = logits_NE.min() - 0.2 - 0.1 * logits_NE[:, -1].abs()  # different, because thresholds need it
    logits_NE.requires_grad_()
    balancing = Composition({"it": strategy}, {})
    routing = route_logits(logits_NE, case, strategy)
    (gradient_NE,) = torch.autograd.grad(losses(strategy, [routing, routing]).sum() + 0 * logits_NE.sum(), logits_NE)
    revived = bool(gradient_NE[:, -1].mean() < -1e-9 or (routing.topk_experts_NK == E - 1).any())
    weights = [torch.eye(E, requires_grad=True)] * 2
    for _ in range(3000):  # a bias may need many small steps
        before = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
        balancing.update(balancing.measure([routing, routing]), 1, weights, 0.1, 0)
        changed = any(not torch.equal(before[name], tensor) for name, tensor in strategy.state_dict().items())
        if revived or not (changed and balancing.steers):
            break  # further steps would repeat this one
        routing = route_logits(logits_NE.detach(), case, strategy)
        revived = bool((routing.topk_experts_NK == E - 1).any())
    require_declared(strategy, "revives_dead_experts", revived)


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
        probs_NE = torch.nn.functional.pad(routing.probs_NE, (0, 1))  # the last column is for empty slots
        summed_NK = routing.unsteered_experts_NK if strategy.ragged and strategy.drops else routing.topk_experts_NK
        if case.renormalize:
            probs_NE /= probs_NE.gather(1, summed_NK).sum(1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(routing.topk_probs_NK, probs_NE.gather(1, routing.topk_experts_NK))


# Checks on a tiny model that is trained for a few steps


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
    """Return the tiny model with the case's strategy, named it, with coef=1 if the strategy has a loss."""
    strategy = case.make()
    if strategy.coef:
        strategy.coef = 1.0
    return composed_module(Composition({"it": strategy}, {}), case.gating)


def composed_module(balancing: Composition, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with a composition of strategies."""
    model = tiny_model(gating)
    balancing.prepare(model.routers)
    optim = OptimConfig(
        lr=LR, weight_decay=0.0, betas=[0.9, 0.95], eps=1e-8, decay_router=True, warmup_steps=0, z_loss_coef=0.0,
        grad_clip=0.0, aux_layer_reduce="sum",
        algorithm="adamw", momentum=0.95, muon_router=False, schedule="cosine", decay_fraction=0.2, mup=False,
        mup_base_width=128, mup_base_head_dim=32,
    )  # fmt: skip
    return LitMoE(model, balancing, optim, 100, torch.ones(V, dtype=torch.int64))


def batch_of(step: int) -> Tensor:
    """Return the token windows of a step, (B, S + 1)."""
    return torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(step))


def train(module: LitMoE, steps: range, micro_batches: int = 1) -> list[StepResult]:
    """Train with SGD. Sequences are distributed round-robin over micro-batches."""
    optimizer = torch.optim.SGD(module.model.parameters(), LR)
    results = []
    for step in steps:
        chunks = [batch_of(step)[first::micro_batches] for first in range(micro_batches)]
        if module.balancing.needs_step_counts and micro_batches > 1:
            module.count_step(chunks)
        for chunk_BT in chunks:
            (module.training_step(chunk_BT, 0)["loss"] / micro_batches).backward()
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
    rtol, atol = (0.0, 0.0) if exactly else (1e-4, 1e-5)
    return all(torch.allclose(first[key].double(), second[key].double(), rtol, atol) for key in first)


def its_loss_is_part_of_the_training_loss(case: Case) -> None:
    """Check that a training step adds the strategy's loss, reduced over layers as declared."""
    module, window_BT = tiny_module(case), batch_of(0)
    strategy = module.balancing.parts["it"]
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
    equal, scope = same(outcome(one), outcome(four)), case.make().properties.scope
    assert equal == (scope != "micro"), f"scope={scope}, but one and four micro-batches give equal results: {equal}"


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
    module = tiny_module(case)
    strategy = module.balancing.parts["it"]
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
    require_declared(case.make(), "causal", causal)


def relabeling_experts_relabels_the_choice_only_if_declared(case: Case) -> None:
    """Check whether permuted experts are chosen and weighted in the permuted order."""
    order, plain, relabeled = torch.tensor([3, 0, 5, 1, 4, 2]), tiny_module(case), tiny_module(case)
    for module in (plain, relabeled):
        train(module, range(1))
    with torch.no_grad():
        layer: Any
        for layer in relabeled.model.feed_forwards:
            layer.w13_E2FD.copy_(layer.w13_E2FD[order])
            layer.w2_EFD.copy_(layer.w2_EFD[order])
            permuted_ED = layer.router.weight_ED[order]
            if "weight_ED" in dict(layer.router.named_parameters()):
                layer.router.weight_ED.copy_(permuted_ED)
            else:
                layer.router.weight_ED = permuted_ED  # the parametrization computes its parameter
    relabeled.balancing.load_state_dict(
        {name: tensor[..., order] if tensor.shape[-1:] == (E,) else tensor for name, tensor in state(plain).items()}
    )
    first, second = (train(module, range(1, 2))[0] for module in (plain, relabeled))
    assert first.counts_LE is not None
    assert second.counts_LE is not None
    first_loss, second_loss = (step.losses[0].get("aux/it", torch.zeros(())) for step in (first, second))
    same_choice = torch.equal(first.counts_LE[:, order], second.counts_LE)
    same_loss = torch.allclose(first_loss, second_loss, rtol=1e-4)
    require_declared(case.make(), "equivariant", same_choice and same_loss)


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

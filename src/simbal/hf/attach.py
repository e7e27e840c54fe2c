"""Attach balancing strategies to a Hugging Face MoE: to its router decisions, loss and optimizer steps.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, D model width, E experts, K experts per token.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing
from simbal.balancing.bias import LossFree
from simbal.balancing.composition import Composition
from simbal.balancing.controls import FrozenRouter
from simbal.balancing.orthogonal import OrthogonalInit, OrthogonalMixture, OrthogonalParametrization
from simbal.balancing.step import StepInProgress
from simbal.config.schedule import Schedule
from simbal.distributed import copy_full, full_tensor
from simbal.errors import UserError
from simbal.hf.hooks import ForwardPass, Hooks, hooks_on
from simbal.hf.routers import HFRouter, find_backbone, find_routers
from simbal.model.router import Routing

log = logging.getLogger("simbal")

PARAMETRIZED = "it parametrizes the router weight, which changes the model's parameters and state_dict"
NOT_ATTACHABLE: dict[type[Balancing], str] = {
    OrthogonalInit: "call torch.nn.init.orthogonal_ on the weight of each router instead",
    OrthogonalMixture: PARAMETRIZED,
    OrthogonalParametrization: PARAMETRIZED,
}


def attach(
    model: nn.Module,
    strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing],
    *,
    schedules: Mapping[str, Schedule] | None = None,
    layer_reduce: str = "sum",
) -> "Attachment":
    """Attach strategies to the routers of a Hugging Face transformers 5 Mixture-of-Experts.

        balancing = attach(model, [SimBal(coef=0.1), LossFree(update_rate=0.001)])
        for batch in batches:
            (model(**batch).loss + balancing.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancing.step()
        balancing.detach()

    The model's parameters and state_dict do not change, and its outputs change only if a strategy steers routers. The
    model's own load-balancing loss is off unless `model.config.output_router_logits` is True. To turn it off, set that
    to False or `model.router_aux_loss_coef` to 0; the config key is only read when the model is created.

    Args:
        model: a model with known routers, on one device, or trained with DDP or FSDP2 (`fully_shard`).
        strategies: one or more strategies; the default name of a strategy is its class name. Their router
            initialization is ignored.
        schedules: schedules of the coefficients, by strategy name.
        layer_reduce: sum or mean, the reduction of a loss over layers, unless the strategy sets it.

    Raises:
        UserError: the model has no known routers, or the strategies do not work with them or with each other.
    """
    routers, parts = find_routers(model), name_strategies(strategies)
    if hooks_on(routers):
        raise UserError("the model has strategies attached: call detach() first, or attach all strategies at once")
    require_attachable(parts, routers)
    if unknown := (schedules or {}).keys() - parts.keys():
        raise UserError(f"schedules: {min(unknown)} is not one of the strategies {', '.join(parts)}")
    for name, part in parts.items():
        if isinstance(part, FrozenRouter):
            continue  # frozen below, when nothing can be refused any more
        try:
            part.prepare(routers)  # type: ignore[arg-type]  # HFRouter has the attributes of a Router
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(model, "router_aux_loss_coef", 0):
        fix = "set model.config.output_router_logits = False, or with trl, router_aux_loss_coef=0.0 in its config"
        log.warning(f"the model adds its own load-balancing loss: {fix}")
    composition = Composition(parts, schedules or {}, layer_reduce)
    model_bias = use_model_bias(composition, routers, type(model).__name__)
    attachment = Attachment(find_backbone(model, routers), routers, composition, model_bias)
    if any(isinstance(part, FrozenRouter) for part in parts.values()):
        attachment.freeze_routers()
    return attachment


class Attachment:
    """Strategies attached to a model, returned by `attach`. Used as a context manager, it detaches them on exit.

    `loss` and `routings` refer to the last forward pass. Forward passes in training mode with gradients count toward
    the current optimizer step, which `step` ends; passes in evaluation mode do not. A pass recomputed by gradient
    checkpointing is not counted again and chooses the same experts.

    If routers have their own bias on the choice of experts (DeepSeek-V3, GLM-4, MiniMax-M2, Ernie 4.5), `LossFree`
    updates this bias in place. The model uses and saves the bias, also after `detach`.

    Padding (zeros of a two-dimensional attention_mask) is excluded from every loss and count, but it affects
    strategies that choose for all tokens of a micro-batch at once, such as Sinkhorn. Packed documents, at which
    position_ids restart, are separate sequences for losses with scope=sequence.
    """

    def __init__(
        self, backbone: nn.Module, routers: list[HFRouter], strategies: Composition, model_bias: "ModelBias | None"
    ) -> None:
        self.routers, self.strategies, self._model_bias = routers, strategies, model_bias
        self.steps = 0  # optimizer steps
        steering = strategies if strategies.steers else None
        self._hooks = Hooks(backbone, routers, steering, self._finish_pass, self._start_pass)
        self._frozen: list[nn.Parameter] = []  # by `freeze_routers`
        self.discard()

    def freeze_routers(self) -> None:
        """Train no parameter of a router until `detach`. Optimizers skip parameters without a gradient."""
        parameters = [parameter for router in self.routers for parameter in router.module.parameters()]
        self._frozen = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False).grad = None

    def discard(self) -> None:
        """Discard the optimizer step in progress and the last forward pass. Call it when a step is skipped."""
        self._hooks.forget()
        self._step = StepInProgress(self.strategies)
        self._counting: StepInProgress | None = None  # the first of two passes over the micro-batches of a step

    @property
    def routings(self) -> list[Routing]:
        """The router decisions of each MoE layer in the last forward pass, without padding.

        Raises:
            UserError: there was no pass since the last `step`.
        """
        return self._last_pass()[1]

    @property
    def micro_batches(self) -> int:
        """The number of forward passes in the optimizer step in progress."""
        return self._step.micro_batches

    @property
    def last_counts(self) -> bool:
        """Whether the last forward pass counts toward the optimizer step in progress."""
        return self._last_pass()[0].counted

    @property
    def counts_LE(self) -> Tensor:
        """Tokens per expert in the optimizer step in progress, (L, E), without padding.

        Raises:
            UserError: no forward pass counted toward this step.
        """
        if self._step.counts_LE is None:
            raise UserError("no forward pass in training mode with gradients: call model.train()")
        return self._step.counts_LE

    def _last_pass(self) -> tuple[ForwardPass, list[Routing]]:
        if self._hooks.finished is None:
            raise UserError("call the model first: there was no forward pass since the last step()")
        return self._hooks.finished

    def loss(self) -> Tensor:
        """Return the sum of the strategies' losses for the last forward pass, a scalar to add to the model's loss.

        Raises:
            UserError: see `losses`.
        """
        terms = [*self.losses().values()]
        return torch.stack(terms).sum() if terms else self.routings[0].logits_NE.new_zeros(())

    def losses(self) -> dict[str, Tensor]:
        """Return the loss of each strategy for the last forward pass, a scalar, by name.

        It includes the coefficient, the schedule and the reduction over layers.

        Raises:
            UserError: there was no forward pass, or a strategy does not support it.
        """
        last, routings = self._last_pass()
        for name, part in self.strategies.parts.items():
            check_pass(name, part, last, routings)
        if last.counted:
            return self._step.losses(routings, self.steps)
        uncounted = StepInProgress(self.strategies, self._step.step_counts)
        uncounted.add(routings)
        return uncounted.losses(routings, self.steps)

    @contextmanager
    def counting_pass(self) -> Iterator[None]:
        """Count without gradients. With scope=global, first run all micro-batches of a step within this block."""
        with self._step.counting_pass() as counting:
            self._counting = counting
            try:
                yield
            finally:
                self._counting = None

    def step(self, lr: float | None = None) -> None:
        """Update the strategies after an optimizer step, and free the recorded passes.

        Args:
            lr: learning rate of the step, for strategies that need it.

        Raises:
            UserError: no forward pass counted toward the step, or a strategy needs `lr`.
        """
        for name, part in self.strategies.parts.items():
            if part.needs_lr and lr is None:
                raise UserError(f"{name} needs the learning rate: call step(lr=...)")
        if not self._step.micro_batches:
            raise UserError("step() without a forward pass in training mode with gradients: call model.train()")
        if self._model_bias:
            self._model_bias.read()
        with torch.no_grad():  # a gathered weight requires no gradient, which a strategy's `update` may need
            found = [(router.parameter_ED, router.weight_ED) for router in self.routers]
            weights = [weight if weight is own else nn.Parameter(weight) for own, weight in found]
        self._step.finish(weights, lr or 0.0, self.steps)
        for router, weight_ED in zip(self.routers, weights, strict=True):
            if weight_ED is not router.parameter_ED:
                copy_full(router.parameter_ED, weight_ED)
        if self._model_bias:
            self._model_bias.write()
        self.steps += 1
        self.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of optimizer steps and the state of the strategies. Call it between steps."""
        if self._model_bias:
            self._model_bias.read()
        return {"steps": self.steps, "strategies": self.strategies.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the same strategies on a model of the same shape."""
        self.strategies.load_state_dict(state["strategies"])
        if self._model_bias:
            self._model_bias.write()
        self.steps = state["steps"]

    def detach(self) -> None:
        """Remove all hooks from the model and free the recorded passes. The model's own bias keeps its values."""
        self._hooks.remove()
        self.discard()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _start_pass(self, training: bool) -> None:
        self.strategies.train(training).to(self.routers[0].parameter_ED.device)

    def _finish_pass(self, last: ForwardPass, routings: list[Routing]) -> None:
        step = self._step if last.counted else self._counting
        if step is not None:
            step.add(routings)


@dataclass(frozen=True)
class ModelBias:
    """The biases of a model's routers, updated by `strategy`. The values in the model take precedence."""

    strategy: LossFree
    routers: Sequence[HFRouter]

    @property
    def biases(self) -> list[Tensor]:
        """The bias of each router, with E elements."""
        return [bias for router in self.routers if (bias := router.bias) is not None]

    @torch.no_grad()
    def read(self) -> None:
        """Copy the biases of the model to the strategy."""
        before_LE = self.strategy.bias_LE
        self.strategy.bias_LE = torch.stack([full_tensor(bias).view(-1).to(before_LE) for bias in self.biases])

    @torch.no_grad()
    def write(self) -> None:
        """Copy the biases of the strategy to the model."""
        for bias, strategy_E in zip(self.biases, self.strategy.bias_LE, strict=True):
            copy_full(bias, strategy_E.view(bias.shape))


def use_model_bias(composition: Composition, routers: Sequence[HFRouter], model: str) -> ModelBias | None:
    """Let a `LossFree` strategy update the bias of the model's routers, which keep choosing experts by their own rule.

    Return the biases, or None if no strategy chooses experts or the strategy can replace the rule. `model` is the
    name of the model's class.

    Raises:
        UserError: a strategy cannot steer routers with this rule, or would update the bias wrongly.
    """
    rule, name = routers[0].rule, composition.chooser
    if rule.samples_in_training and composition.steers:
        raise UserError(f"{model} samples experts in training: attach losses, not {name or composition.adjuster}")
    if name is None or rule.is_topk:
        return None
    strategy = composition.parts[name]
    if not (rule.biased and isinstance(strategy, LossFree)):
        alternative = "; use LossFree(bias_on='scores'), which updates their bias" if rule.biased else ""
        raise UserError(f"{name} chooses experts, but the routers of {model} have another rule: {rule}{alternative}")
    if strategy.bias_on != "scores":
        raise UserError(f"{name}: {model} adds its bias to the scores after the gating: set bias_on='scores'")
    model_bias = ModelBias(strategy, routers)
    if any(bias.dtype.itemsize < 4 for bias in (strategy.bias_LE, *model_bias.biases)):
        bias = routers[0].bias_at[1] if routers[0].bias_at else ""
        fix = f"set bias_dtype='fp32', and m.{bias}.data = m.{bias}.data.float() for each module m that has this bias"
        raise UserError(f"{name}: half precision rounds the bias updates to 0; {fix}")
    composition.choosers.clear()
    model_bias.read()
    return model_bias


def name_strategies(strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing]) -> dict[str, Balancing]:
    """Return strategies by name; the default name is the class name.

    Raises:
        UserError: an object is not a strategy, or two have the same name.
    """
    if isinstance(strategies, Mapping):
        parts = dict(strategies)
    else:
        given = list(strategies) if isinstance(strategies, Iterable) else [strategies]
        parts = {type(strategy).__name__: strategy for strategy in given}
        if len(parts) < len(given):
            raise UserError("several strategies of one class need names: attach(model, {name: strategy, ...})")
    for name, strategy in parts.items():
        if not isinstance(strategy, Balancing):
            raise UserError(f"{name}: {strategy!r} is not an instance of simbal.balancing.Balancing")
    return parts


def require_attachable(parts: Mapping[str, Balancing], routers: Sequence[HFRouter]) -> None:
    """Raise `UserError` for a strategy that would have no effect, or that hooks cannot implement."""
    freezer = next((name for name, part in parts.items() if isinstance(part, FrozenRouter)), None)
    is_frozen = freezer is not None or not any(router.parameter_ED.requires_grad for router in routers)
    for name, part in parts.items():
        reason = next((reason for kind, reason in NOT_ATTACHABLE.items() if isinstance(part, kind)), None)
        if part.ragged:
            reason = "the model computes exactly K experts per token"
        elif type(part).logits is not Balancing.logits:
            reason = reason or "it computes router logits differently from the model"
        elif part.needs_experts:
            reason = "it needs the experts' weights, and only the routers are available"
        if reason:
            raise UserError(f"{name} cannot be attached: {reason}")
        if is_frozen and part.properties.scope == "weights" and part.coef:
            fix = "set requires_grad" if freezer is None else f"attach it without {freezer}"
            raise UserError(f"{name} is a loss on the router weights, but they are frozen: {fix}")


def check_pass(name: str, part: Balancing, last: ForwardPass, routings: list[Routing]) -> None:
    """Raise `UserError` if a loss would be wrong, or would have no gradient."""
    if not part.properties.differentiable or part.properties.scope == "weights":
        return
    is_lost = any(r.router_weight_ED.requires_grad and not r.logits_NE.requires_grad for r in routings)
    if last.with_gradient and torch.is_grad_enabled() and is_lost:
        fix = "enable it with {'use_reentrant': False}"
        raise UserError(f"{name} needs the gradient of the router logits, which gradient checkpointing drops: {fix}")

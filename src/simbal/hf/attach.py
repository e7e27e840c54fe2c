"""Attaches strategies to a Hugging Face MoE: to its routers' decisions, its loss and its optimizer steps.

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
from simbal.errors import UserError
from simbal.hf.hooks import ForwardPass, Hooks, refuse_second
from simbal.hf.routers import HFRouter, find_backbone, find_routers
from simbal.model.router import Routing

log = logging.getLogger("simbal")


def attach(
    model: nn.Module,
    strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing],
    *,
    schedules: Mapping[str, Schedule] | None = None,
    layer_reduce: str = "sum",
) -> "Attachment":
    """Hook strategies onto the routers of a Mixture-of-Experts model of Hugging Face transformers 5.

        balancing = attach(model, [SimBal(coef=0.1), LossFree(update_rate=0.001)])
        for batch in batches:
            (model(**batch).loss + balancing.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancing.step()
        balancing.detach()

    The model's parameters, its state_dict and, with strategies that only add a loss, its outputs stay what they are.
    The load balancing loss of the model is off unless `model.config.output_router_logits` is True; then set that to
    False, or `model.router_aux_loss_coef` to 0 (the key of the config is read only when the model is made).

    Args:
        model: of any class that holds such routers, with whole weights in each process.
        strategies: one or several, by name or under the names of their classes. Initial weights are left alone.
        schedules: the factor of a strategy's coefficient over the steps, by the strategy's name.
        layer_reduce: sum or mean of a loss over layers, where the strategy does not say.

    Raises:
        UserError: no such routers, or strategies that cannot work with them or with each other.
    """
    routers, parts = find_routers(model), named(strategies)
    refuse_second(routers)
    refuse(parts, routers)
    if unknown := (schedules or {}).keys() - parts.keys():
        raise UserError(f"schedules: {min(unknown)} is none of the strategies {', '.join(parts)}")
    for name, part in parts.items():
        try:
            part.prepare(routers)  # type: ignore[arg-type]  # they have the attributes of a Router
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(model, "router_aux_loss_coef", 0):
        log.warning("the model adds a load balancing loss of its own: set model.config.output_router_logits = False")
    composition = Composition(parts, schedules or {}, layer_reduce)
    model_bias = take_over(composition, routers, type(model).__name__)
    return Attachment(find_backbone(model, routers), routers, composition, model_bias)


class Attachment:
    """The strategies on a model, as `attach` returns them; a context manager, which detaches them at the end.

    `loss` and `routings` are of the last forward pass. Passes in training mode with gradients count towards the
    optimizer step that `step` ends; those of evaluation do not. A pass that gradient checkpointing computes again is
    not counted again, and gets the same choice of experts.

    On routers with a bias of their own on the choice (DeepSeek-V3, GLM-4, MiniMax-M2, Ernie 4.5) `LossFree` moves that
    bias, in place and from the values that it has: the model chooses by it and saves it, and it stays after `detach`.

    Padding (zeros of a two-dimensional attention_mask) is left out of every loss and count. Strategies that choose by
    the whole micro-batch, such as Sinkhorn, do see it.
    """

    def __init__(
        self, backbone: nn.Module, routers: list[HFRouter], strategies: Composition, model_bias: "ModelBias | None"
    ) -> None:
        self.routers, self.strategies, self._model_bias = routers, strategies, model_bias
        self.steps = 0  # optimizer steps that are done
        steering = strategies if strategies.steers else None
        self._hooks = Hooks(backbone, routers, steering, self._finish_pass, self._start_pass)
        self.discard()

    def discard(self) -> None:
        """Forget the optimizer step in progress and the last forward pass, as for a step that is skipped."""
        self._hooks.forget()
        self._step = StepInProgress(self.strategies)
        self._counting: StepInProgress | None = None  # the first of two passes over the step's micro-batches

    @property
    def routings(self) -> list[Routing]:
        """The decisions of each MoE layer's router in the last forward pass, without padding.

        Raises:
            UserError: there was none since the last `step`, or the strategies are detached.
        """
        return self._finished()[1]

    @property
    def micro_batches(self) -> int:
        """The number of forward passes that count towards the optimizer step in progress."""
        return self._step.micro_batches

    @property
    def last_counts(self) -> bool:
        """Whether the last forward pass, whose loss `losses` returns, counts towards that step."""
        return self._finished()[0].counted

    @property
    def counts_LE(self) -> Tensor:
        """The tokens of each expert in the optimizer step in progress, (L, E), padding left out.

        Raises:
            UserError: no forward pass counted towards it.
        """
        if self._step.counts_LE is None:
            raise UserError("no forward pass in training mode and with gradients: call model.train()")
        return self._step.counts_LE

    def _finished(self) -> tuple[ForwardPass, list[Routing]]:
        if not self._hooks.handles:
            raise UserError("the strategies are detached from the model")
        if self._hooks.finished is None:
            raise UserError("call the model first: no forward pass has been recorded since the last step()")
        return self._hooks.finished

    def loss(self) -> Tensor:
        """Return the sum of all strategies' terms of the last forward pass, a scalar to add to the model's loss.

        Raises:
            UserError: as `losses`.
        """
        terms = [*self.losses().values()]
        return torch.stack(terms).sum() if terms else self.routings[0].logits_NE.new_zeros(())

    def losses(self) -> dict[str, Tensor]:
        """Return each strategy's term of the last forward pass by its name; scalars.

        Coefficient, schedule and reduction over layers are included.

        Raises:
            UserError: there was no forward pass, or a strategy cannot work with it.
        """
        last, routings = self._finished()
        for name, part in self.strategies.parts.items():
            refuse_pass(name, part, last, routings)
        if last.counted:
            return self._step.losses(routings, self.steps)
        alone = StepInProgress(self.strategies, self._step.step_counts)  # a pass that counts towards no step
        alone.add(routings)
        return alone.losses(routings, self.steps)

    @contextmanager
    def counting_pass(self) -> Iterator[None]:
        """Run the model on every micro-batch of a step in here first, without gradients, for losses of scope=global."""
        with self._step.counting_pass() as counting:
            self._counting = counting
            try:
                yield
            finally:
                self._counting = None

    def step(self, lr: float | None = None) -> None:
        """Update the strategies after the optimizer's step, and free what was recorded.

        Args:
            lr: the learning rate of the step, for strategies that look at it.

        Raises:
            UserError: no forward pass counted towards the step, or a strategy needs `lr`.
        """
        for name, part in self.strategies.parts.items():
            if part.needs_lr and lr is None:
                raise UserError(f"{name} needs the learning rate: call step(lr=...)")
        if not self._step.micro_batches:
            raise UserError("step() without a forward pass in training mode and with gradients: call model.train()")
        if self._model_bias:
            self._model_bias.read()
        self._step.finish([router.weight_ED for router in self.routers], lr or 0.0, self.steps)
        if self._model_bias:
            self._model_bias.write()
        self.steps += 1
        self.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of optimizer steps done and the state of the strategies (biases), between two steps."""
        if self._model_bias:
            self._model_bias.read()
        return {"steps": self.steps, "strategies": self.strategies.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state that `state_dict` returned, of the same strategies on a model of the same shape."""
        self.strategies.load_state_dict(state["strategies"])
        if self._model_bias:
            self._model_bias.write()
        self.steps = state["steps"]

    def detach(self) -> None:
        """Take every hook off the model, and free what was recorded; a bias of the model keeps what it has learnt."""
        self._hooks.remove()
        self.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _start_pass(self, training: bool) -> None:
        self.strategies.train(training).to(self.routers[0].weight_ED.device)

    def _finish_pass(self, last: ForwardPass, routings: list[Routing]) -> None:
        step = self._step if last.counted else self._counting
        if step is not None:
            step.add(routings)


@dataclass(frozen=True)
class ModelBias:
    """The biases of a model's routers, which `strategy` moves in place; the truth is always in the model."""

    strategy: LossFree
    routers: Sequence[HFRouter]

    @torch.no_grad()
    def read(self) -> None:
        """Set the strategy's bias, (L, E), to that of the model."""
        self.strategy.bias_LE = torch.stack([bias_E.to(self.strategy.bias_LE) for bias_E in biases_of(self.routers)])

    @torch.no_grad()
    def write(self) -> None:
        """Set the model's biases to that of the strategy."""
        for theirs_E, ours_E in zip(biases_of(self.routers), self.strategy.bias_LE, strict=True):
            theirs_E.copy_(ours_E)


def biases_of(routers: Sequence[HFRouter]) -> list[Tensor]:
    """Return the biases on the choice, (E,) each, of routers that have one."""
    return [bias_E for router in routers if (bias_E := router.bias_E) is not None]


def take_over(composition: Composition, routers: Sequence[HFRouter], model: str) -> ModelBias | None:
    """Leave the choice of experts to the model's own code, where a `LossFree` is to move the model's own bias.

    Return the biases; None if nothing chooses experts, or a strategy can choose them in the routers' place. `model` is
    the name of its class.

    Raises:
        UserError: a strategy cannot steer routers of this rule, or would move a bias as it is not used.
    """
    rule, name = routers[0].rule, composition.chooser
    if rule.draws_in_training and composition.steers:
        raise UserError(
            f"{name or composition.adjuster} changes what routers decide, and those of {model} draw their experts at "
            "random in training, by a rule of their own; losses can be attached"
        )
    if name is None or rule.plain:
        return None
    strategy = composition.parts[name]
    if not (rule.biased and isinstance(strategy, LossFree)):
        other = "; LossFree(bias_on='scores') can move their own bias" if rule.biased else ""
        raise UserError(
            f"{name} chooses experts itself, and the routers of {model} choose by a rule of their own: {rule}{other}"
        )
    if strategy.bias_on != "scores":
        raise UserError(f"{name}: {model} adds its bias to the scores after the gating: set bias_on='scores'")
    if any(bias_E.dtype.itemsize < 4 for bias_E in (strategy.bias_LE, *biases_of(routers))):
        bias = routers[0].bias_at[1] if routers[0].bias_at else ""
        raise UserError(
            f"{name} takes steps that half precision rounds away: keep {bias} in fp32, by m.{bias}.data = "
            f"m.{bias}.data.float() for each module m that has it, with bias_dtype='fp32'"
        )
    composition.chooser = None
    taken = ModelBias(strategy, routers)
    taken.read()
    return taken


PARAMETRIZED = (
    "it replaces the router's weight by a parametrization, which would change the model's parameters and state_dict"
)
REASONS: dict[type[Balancing], str] = {
    FrozenRouter: "it is no more than requires_grad: call requires_grad_(False) on the weight of each router instead",
    OrthogonalInit: "it is only a start: call torch.nn.init.orthogonal_ on the weight of each router instead",
    OrthogonalMixture: PARAMETRIZED,
    OrthogonalParametrization: PARAMETRIZED,
}


def named(strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing]) -> dict[str, Balancing]:
    """Return strategies by name; those without one are called like their class.

    Raises:
        UserError: something is no strategy, or two have the same name.
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
            raise UserError(f"{name}: {strategy!r} is no instance of simbal.balancing.Balancing")
    return parts


def refuse(parts: Mapping[str, Balancing], routers: Sequence[HFRouter]) -> None:
    """Raise `UserError` for a strategy that would do nothing, or more than a hook can take back."""
    frozen = not any(router.weight_ED.requires_grad for router in routers)
    for name, part in parts.items():
        for refused, reason in REASONS.items():
            if isinstance(part, refused):
                raise UserError(f"{name} cannot be attached: {reason}")
        if part.ragged:
            raise UserError(f"{name} cannot be attached: the model computes K experts for each token, no more or fewer")
        if type(part).logits is not Balancing.logits:
            raise UserError(f"{name} cannot be attached: it takes the place of the product that the router computes")
        if part.needs_experts:
            raise UserError(f"{name} cannot be attached: it looks at experts' weights, and here are the routers' alone")
        if frozen and part.properties.scope == "weights" and part.coef:
            raise UserError(f"{name} acts on the router weights, and all of them are frozen: set their requires_grad")


def refuse_pass(name: str, part: Balancing, last: ForwardPass, routings: list[Routing]) -> None:
    """Raise `UserError` if a loss would be wrong, or silently without the gradient that it promises."""
    if not part.properties.differentiable or part.properties.scope == "weights":
        return
    if part.properties.scope == "sequence" and last.kept_N is not None:
        raise UserError(f"{name} takes each sequence by itself, and this batch has padding: use scope=micro")
    lost = any(r.router_weight_ED.requires_grad and not r.logits_NE.requires_grad for r in routings)
    if last.with_gradient and torch.is_grad_enabled() and lost:
        raise UserError(
            f"{name} needs the gradient of the router's logits, and gradient checkpointing has dropped it: "
            "enable it with {'use_reentrant': False}"
        )

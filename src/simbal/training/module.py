"""The LightningModule: one step from tokens to the loss and back to the balancing strategy.

Shapes: B sequences, S sequence length, T = S + 1, N = B*S tokens, V vocabulary, L MoE layers, E experts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import lightning as L
import torch
from torch import Tensor, nn

from simbal.balancing.composition import Composition
from simbal.balancing.step import StepInProgress
from simbal.config.schema import OptimConfig
from simbal.data.loader import TrainBatches, ValidationBatch
from simbal.distributed import full_tensor, sum_over_ranks, world_size
from simbal.model.head import HeadLoss, head_loss
from simbal.model.router import Router, Routing
from simbal.model.transformer import Transformer
from simbal.training.failures import DivergedError, layer_statistics
from simbal.training.optimizer import build_optimizer
from simbal.training.strategies import shard, whole_routers
from simbal.training.validation import Validation, ValidationTotals


@dataclass(frozen=True)
class StepResult:
    """The findings of one rank in one optimizer step; tensors stay on the device until somebody reads them."""

    number: int  # the steps done, this one included
    losses: Sequence[Mapping[str, Tensor]]  # of each micro-batch: the scalars `loss`, `ce` and `aux/STRATEGY`
    grad_norm: Tensor  # of the whole gradient, before clipping
    clipped: Tensor  # the factor that clipping has scaled it by; NaN where the step was skipped
    aux_grad_norm: Tensor | None  # of `aux_gradient`; None where nobody asked for it, or there is none
    counts_LE: Tensor | None  # tokens per expert; None in a dense model, and where the step was skipped
    skipped_steps: int | None  # of the run so far, as their loss or gradient was not finite; None: none may be

    def mean_losses(self) -> dict[str, float]:
        """Return each loss by name, mean over micro-batches and ranks; a collective, and the device is waited for."""
        names = [*self.losses[0]]
        sums = torch.tensor([sum(loss[name].item() for loss in self.losses) for name in names], dtype=torch.float64)
        means = sum_over_ranks(sums) / world_size() / len(self.losses)
        return dict(zip(names, means.tolist(), strict=True))


class Observer(Protocol):
    """A receiver of what training finds; it changes nothing that the training depends on."""

    def wants_aux_gradient(self, number: int) -> bool:
        """Whether to measure the gradient of the auxiliary losses in step `number`; the same on every rank."""

    def observe_step(self, step: StepResult) -> None:
        """Receive a finished optimizer step, before Lightning calls `on_train_batch_end`."""

    def observe_validation(self, validation: Validation) -> None:
        """Receive the metrics of a validation, before Lightning calls `on_validation_end`."""


class LitMoE(L.LightningModule):
    """The trained model: loss = cross-entropy + z-loss + the terms of the balancing strategies.

    Lightning calls these in one optimizer step, in this order:

    1. `on_train_batch_start`, before every micro-batch: before the first of several, if a loss needs the counts of the
       whole step, `count_step` runs the model on all of them without gradients.
    2. `training_step`, for every micro-batch: the model, the counts, and the loss, of which Lightning then takes the
       gradient and adds it up.
    3. `optimizer_step`, which begins before the `training_step` of the last micro-batch; after it, still within
       a. `configure_gradient_clipping` clips the gradient; one that is not finite skips the step or ends the run;
       b. AdamW moves the weights;
       c. `finish_step` updates the strategies with the step's counts, and its `StepResult` goes to the observers.
    4. The schedule moves the learning rate, as `configure_optimizers` says.
    """

    def __init__(
        self,
        model: Transformer,
        balancing: Composition,
        optim: OptimConfig,
        max_steps: int,
        bytes_of_token_V: Tensor,
        skip_nonfinite: int = 0,
    ) -> None:
        """Make the module, which has no observers yet.

        Args:
            model: the model to train.
            balancing: the strategies.
            optim: the objective's fixed terms and the optimizer's numbers.
            max_steps: optimizer steps of the schedule.
            bytes_of_token_V: UTF-8 bytes that each token stands for.
            skip_nonfinite: how many steps whose loss or gradient is not finite are skipped, before the run diverges.
        """
        super().__init__()
        self.model, self.balancing, self.optim, self.max_steps = model, balancing, optim, max_steps
        self.skip_nonfinite, self.skipped_steps = skip_nonfinite, 0
        self.bytes_of_token_V = nn.Buffer(bytes_of_token_V, persistent=False)
        self.observers: list[Observer] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self.balancing_step = StepInProgress(self.balancing)
        self._losses: list[dict[str, Tensor]] = []  # of each micro-batch so far
        self._grad_norm = torch.zeros(())  # before clipping
        self._clipped = torch.tensor(torch.nan)
        self._aux_gradients: list[Tensor] = []  # (L, E, D) of each micro-batch so far, if it is asked for

    def configure_model(self) -> None:
        """Share the model among the ranks if each is to hold a part; called before every fit and validation."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[HeadLoss, list[Routing]]:
        """Return the loss of the language model alone, and every layer's routing."""
        hidden_BSD, routings = self.model(tokens_BS, self.balancing)
        targets_N = targets_BS.flatten()
        return head_loss(hidden_BSD.flatten(0, 1), self.model.head_VD, targets_N, self.optim.z_loss_coef), routings

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Count all micro-batches of the step before the first of several, if a loss needs it."""
        accumulation = self.trainer.accumulate_grad_batches
        if self.balancing.needs_step_counts and accumulation > 1 and batch_idx % accumulation == 0:
            loader = cast(TrainBatches, self.trainer.train_dataloader)
            with self.trainer.precision_plugin.forward_context():
                self.count_step(window_BT.to(self.device) for window_BT in loader.micro_batches(self.global_step))

    def count_step(self, windows: Iterable[Tensor]) -> None:
        """Count the micro-batches of this rank's step, `windows` of (B, T), ahead of the pass that trains on them."""
        with self.balancing_step.counting_pass() as counting:
            for window_BT in windows:
                _, routings = self.model(window_BT[:, :-1], self.balancing)
                counting.add(routings)

    def training_step(self, window_BT: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Return a micro-batch's losses, scalars by name: `loss`, which has the gradient, `ce` and `aux/STRATEGY`.

        `window_BT` holds the inputs and, shifted by one, the targets.
        """
        measured = any(observer.wants_aux_gradient(self.global_step + 1) for observer in self.observers)
        with keeping_inputs(self.model.routers, measured):
            head, routings = self(window_BT[:, :-1], window_BT[:, 1:])
        self.balancing_step.add(routings)
        aux = self.balancing_step.losses(routings, self.global_step)
        if measured and aux:
            self._aux_gradients += self.aux_gradient(routings, window_BT[:, :-1])
        loss = torch.stack([head.loss, *aux.values()]).sum()
        losses = {"loss": loss, "ce": head.nll_N.mean()} | {f"aux/{name}": part for name, part in aux.items()}
        self._losses.append({name: part.detach() for name, part in losses.items()})
        return losses

    def aux_gradient(self, routings: Sequence[Routing], tokens_BS: Tensor) -> list[Tensor]:
        """Return the gradient of the auxiliary losses of one micro-batch by the routers' weights, (L, E, D).

        The hidden states that the routers read are held fixed: what the losses do to them is not in it. The list is
        empty where no router is trained.
        """
        if not all(routing.router_weight_ED.requires_grad for routing in routings):
            return []
        weights = [routing.router_weight_ED.detach().requires_grad_() for routing in routings]  # fsdp sees only its own
        again = [
            replace(router.route(routing.x_ND, weight_ED, tokens_BS, self.balancing), experts=routing.experts)
            for router, routing, weight_ED in zip(self.model.routers, routings, weights, strict=True)
            if routing.x_ND is not None
        ]
        losses = torch.stack([*self.balancing_step.losses(again, self.global_step).values()])
        return [torch.stack(torch.autograd.grad(losses.sum(), weights, materialize_grads=True))]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Make the optimizer step, once for all its micro-batches, and finish it."""
        step, lr = self.global_step, self.trainer.optimizers[0].param_groups[0]["lr"]
        super().optimizer_step(*args, **kwargs)
        finished = self.finish_step(step, lr)
        for observer in self.observers:
            observer.observe_step(finished)

    def finish_step(self, step: int, lr: float) -> StepResult:
        """Update the strategies once the optimizer has made step `step` (from 0) at rate `lr`, and begin the next."""
        balancing_step = self.balancing_step
        skipped = self.skipped_steps if self.skip_nonfinite else None
        finished = StepResult(
            step + 1, self._losses, self._grad_norm, self._clipped, self._aux_grad_norm(), balancing_step.counts_LE,
            skipped,
        )  # fmt: skip
        self._begin_step()
        with whole_routers(self.model) as weights:
            balancing_step.finish(weights, lr, step)
        return finished

    def _aux_grad_norm(self) -> Tensor | None:
        """Return the norm of the mean of the step's `aux_gradient` over micro-batches and ranks."""
        if not self._aux_gradients:
            return None
        mean_LED = sum_over_ranks(torch.stack(self._aux_gradients).mean(0)) / world_size()
        norm: Tensor = torch.linalg.vector_norm(mean_LED)
        return norm

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the norm of the whole gradient to `optim.grad_clip`, 0 being no bound.

        Raises:
            DivergedError: loss or gradient are not finite, and no more steps may be skipped.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        loss = sum_over_ranks(torch.stack([losses["loss"] for losses in self._losses]).sum())
        self._grad_norm = full_tensor(norm)
        if (self._grad_norm + loss).isfinite():
            bound = self.optim.grad_clip or float("inf")
            nn.utils.clip_grads_with_norm_(self.parameters(), bound, norm)
            self._clipped = (bound / (self._grad_norm + 1e-6)).clamp(max=1)  # as torch does it
        else:
            self._skip_step(loss)

    def _skip_step(self, loss: Tensor) -> None:
        """Let neither weights nor strategies learn from the step, or raise `DivergedError`."""
        if self.skipped_steps == self.skip_nonfinite:
            what = "the gradient" if loss.isfinite() else "the loss"
            counts_LE = self.balancing_step.counts_LE
            statistics = layer_statistics(self.model, None if counts_LE is None else sum_over_ranks(counts_LE))
            raise DivergedError(what, self.global_step + 1, statistics)
        self.skipped_steps += 1
        self.zero_grad()  # an optimizer leaves alone what has no gradient
        self.balancing_step = StepInProgress(self.balancing)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the number of skipped steps, and the optimizer's state by the names of parameters.

        torch numbers them in the order of the optimizer's groups, which Lightning's FSDP2 takes for the model's.
        """
        checkpoint["skipped_steps"] = self.skipped_steps
        names = {parameter: name for name, parameter in self.named_parameters()}
        for optimizer, saved in zip(self.trainer.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            named = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            by_number = dict(enumerate(name for group in named for name in group))
            saved["state"] = {by_number.get(number, number): state for number, state in saved["state"].items()}
            for group, group_names in zip(saved["param_groups"], named, strict=True):
                group["params"] = group_names

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting skipped steps where the checkpoint was saved."""
        self.skipped_steps = checkpoint["skipped_steps"]

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule, which moves once per optimizer step."""
        optimizer, scheduler = build_optimizer(self.model, self.optim, self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Begin every validation with empty sums."""
        self.totals = ValidationTotals()

    def validation_step(self, batch: ValidationBatch, batch_idx: int) -> None:
        """Add a batch of the validation split to the sums."""
        targets_BS = batch.windows_BT[:, 1:]
        head, routings = self(batch.windows_BT[:, :-1], targets_BS)
        if not len(batch.documents_BS):
            return
        target_bytes_N, documents_N = self.bytes_of_token_V[targets_BS.flatten()], batch.documents_BS.flatten()
        self.totals.add(head.nll_N, target_bytes_N, documents_N, routings)

    def on_validation_epoch_end(self) -> None:
        """Hand the metrics of the validation to the observers.

        Raises:
            DivergedError: the perplexity is not finite.
        """
        try:
            validation = self.totals.over_ranks().summary([router.weight_ED for router in self.model.routers])
        except ArithmeticError:
            statistics = layer_statistics(self.model, None)
            raise DivergedError("the perplexity of the validation", self.global_step, statistics) from None
        for observer in self.observers:
            observer.observe_validation(validation)


@contextmanager
def keeping_inputs(routers: Sequence[Router], wanted: bool) -> Iterator[None]:
    """Let every router keep its input within the block if `wanted`; else those that a strategy has asked to."""
    asked = [router.keeps_input for router in routers]
    for router in routers:
        router.keeps_input |= wanted
    yield
    for router, keeps in zip(routers, asked, strict=True):
        router.keeps_input = keeps

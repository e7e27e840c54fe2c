"""The LightningModule: one optimizer step, from tokens to the loss and the updates of weights and balancing strategies.

Shapes: B sequences, S sequence length, T = S + 1, N = B*S tokens, V vocabulary, L MoE layers, E experts, D model width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

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
from simbal.training.strategies import full_router_weights, shard
from simbal.training.validation import Validation, ValidationTotals


@dataclass(frozen=True)
class StepResult:
    """Measurements of one optimizer step on one rank. Tensors stay on the device until they are read."""

    number: int  # step number, counted from 1
    losses: Sequence[Mapping[str, Tensor]]  # per micro-batch: the scalars `loss`, `ce` and `aux/STRATEGY`
    grad_norm: Tensor  # of the full gradient, before clipping
    clipped: Tensor  # factor by which clipping scaled the gradient; NaN if the step was skipped
    aux_grad_norm: Tensor | None  # norm of `aux_gradient`; None if it was not measured
    counts_LE: Tensor | None  # tokens per expert; None in a dense model, and if the step was skipped
    skipped_steps: int | None  # number of skipped steps in the run so far; None if skipping is off

    def mean_losses(self) -> dict[str, float]:
        """Return each loss averaged over micro-batches and ranks; a collective that synchronizes with the device."""
        names = [*self.losses[0]]
        sums = torch.tensor([sum(loss[name].item() for loss in self.losses) for name in names], dtype=torch.float64)
        means = sum_over_ranks(sums) / world_size() / len(self.losses)
        return dict(zip(names, means.tolist(), strict=True))


class LitMoE(L.LightningModule):
    """The trained model. Its loss is cross-entropy + z-loss + the auxiliary losses of the balancing strategies.

    One optimizer step, in the order of Lightning's calls:

    1. `on_train_batch_start`, before every micro-batch. Before the first of several micro-batches, if a loss needs the
       token counts of the full step, `count_step` runs the model on all of them without gradients.
    2. `training_step`, for every micro-batch: runs the model, adds its counts to the step and returns the loss.
       Lightning computes and accumulates the gradient.
    3. `optimizer_step`, once. Lightning runs the last micro-batch's `training_step` inside it. Then
       a. `configure_gradient_clipping` clips the gradient; if it is not finite, the step is skipped or the run ends;
       b. the optimizer updates the weights;
       c. `finish_step` updates the strategies with the step's counts. `step_result` holds the measurements until the
          next micro-batch, for callbacks that run in `on_train_batch_end`.
    4. The scheduler from `configure_optimizers` updates the learning rate.
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
        """Store the model and its settings.

        Args:
            model: the model to train.
            balancing: the balancing strategies.
            optim: the settings of the optimizer, and the z-loss coefficient.
            max_steps: length of the learning-rate schedule in optimizer steps.
            bytes_of_token_V: UTF-8 bytes of each token's text.
            skip_nonfinite: number of steps with a non-finite loss or gradient to skip before the run diverges.
        """
        super().__init__()
        self.model, self.balancing, self.optim, self.max_steps = model, balancing, optim, max_steps
        self.skip_nonfinite, self.skipped_steps = skip_nonfinite, 0
        self.bytes_of_token_V = nn.Buffer(bytes_of_token_V, persistent=False)
        # whether to measure the gradient of the auxiliary losses in a step, counted from 1; the same on every rank
        self.measures_aux_gradient: Callable[[int], bool] = lambda number: False
        self.step_result: StepResult | None = None  # None unless the latest micro-batch completed a step
        self.validation: Validation | None = None  # the latest
        self._begin_step()

    def _begin_step(self) -> None:
        self.balancing_step = StepInProgress(self.balancing)
        self._losses: list[dict[str, Tensor]] = []  # of each micro-batch so far
        self._grad_norm = torch.zeros(())  # before clipping
        self._clipped = torch.tensor(torch.nan)
        self._aux_gradients: list[Tensor] = []  # (L, E, D) of each micro-batch so far, if measured

    def configure_model(self) -> None:
        """Shard the model if FSDP is used. Lightning calls this before every fit and validation."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[HeadLoss, list[Routing]]:
        """Return the language-model loss without auxiliary losses, and every layer's routing."""
        hidden_BSD, routings = self.model(tokens_BS, self.balancing)
        targets_N = targets_BS.flatten()
        head = (hidden_BSD.flatten(0, 1), self.model.head_VD, targets_N, self.optim.z_loss_coef, self.model.kernels)
        return head_loss(*head), routings

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Before the first of several micro-batches, count the full step if a loss needs it."""
        self.step_result = None
        accumulation = self.trainer.accumulate_grad_batches
        if self.balancing.needs_step_counts and accumulation > 1 and batch_idx % accumulation == 0:
            loader = cast(TrainBatches, self.trainer.train_dataloader)
            with self.trainer.precision_plugin.forward_context():
                self.count_step(window_BT.to(self.device) for window_BT in loader.micro_batches(self.global_step))

    def count_step(self, windows: Iterable[Tensor]) -> None:
        """Count tokens per expert in all micro-batches (B, T) of this rank's step, before training on them."""
        with self.balancing_step.counting_pass() as counting:
            for window_BT in windows:
                _, routings = self.model(window_BT[:, :-1], self.balancing)
                counting.add(routings)

    def training_step(self, window_BT: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Return the losses of one micro-batch: `loss` (with gradient), `ce` and `aux/STRATEGY`.

        `window_BT` holds the inputs and, shifted by one token, the targets.
        """
        measured = self.measures_aux_gradient(self.global_step + 1)
        with keep_router_inputs(self.model.routers, measured):
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
        """Return the gradient (L, E, D) of one micro-batch's auxiliary losses with respect to the router weights.

        The hidden states that enter the routers are held fixed. Routers that are not trained have the gradient 0; the
        list is empty if the losses depend on no trained router.
        """
        weights_ED = [routing.router_weight_ED for routing in routings]  # full even with FSDP
        weights = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights_ED]
        trained = [weight for weight in weights if weight.requires_grad]
        if not trained:
            return []
        rerouted = [
            replace(router.route(routing.x_ND, weight_ED, tokens_BS, self.balancing), experts=routing.experts)
            for router, routing, weight_ED in zip(self.model.routers, routings, weights, strict=True)
            if routing.x_ND is not None
        ]
        loss = torch.stack([*self.balancing_step.losses(rerouted, self.global_step).values()]).sum()
        if not loss.requires_grad:
            return []
        gradients = iter(torch.autograd.grad(loss, trained, materialize_grads=True))
        return [torch.stack([next(gradients) if w.requires_grad else torch.zeros_like(w) for w in weights])]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Run the optimizer once for all micro-batches, and finish the step before callbacks save a checkpoint."""
        step, lr = self.global_step, self.trainer.optimizers[0].param_groups[0]["lr"]
        super().optimizer_step(*args, **kwargs)
        self.step_result = self.finish_step(step, lr)

    def finish_step(self, step: int, lr: float) -> StepResult:
        """Update the strategies after optimizer step `step`, counted from 0, at learning rate `lr`."""
        balancing_step, aux_grad_norm = self.balancing_step, None
        if self._aux_gradients:
            mean_LED = sum_over_ranks(torch.stack(self._aux_gradients).mean(0)) / world_size()
            aux_grad_norm = torch.linalg.vector_norm(mean_LED)
        result = StepResult(
            number=step + 1,
            losses=self._losses,
            grad_norm=self._grad_norm,
            clipped=self._clipped,
            aux_grad_norm=aux_grad_norm,
            counts_LE=balancing_step.counts_LE,
            skipped_steps=self.skipped_steps if self.skip_nonfinite else None,
        )
        self._begin_step()
        with full_router_weights(self.model) as weights:
            balancing_step.finish(weights, lr, step)
        return result

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the norm of the full gradient to `optim.grad_clip`; 0 means no clipping.

        Raises:
            DivergedError: the loss or the gradient is not finite, and no more steps may be skipped.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        loss = sum_over_ranks(torch.stack([losses["loss"] for losses in self._losses]).sum())
        self._grad_norm = full_tensor(norm)
        if (self._grad_norm + loss).isfinite():
            bound = self.optim.grad_clip or float("inf")
            if self.optim.grad_clip:
                nn.utils.clip_grads_with_norm_(self.parameters(), bound, norm)
            self._clipped = (bound / (self._grad_norm + 1e-6)).clamp(max=1)  # same formula as torch
        else:
            self._skip_step(loss)

    def _skip_step(self, loss: Tensor) -> None:
        """Drop the gradients and counts of this step, or raise `DivergedError` if no more steps may be skipped."""
        if self.skipped_steps == self.skip_nonfinite:
            nonfinite = "the gradient" if loss.isfinite() else "the loss"
            counts_LE = self.balancing_step.counts_LE
            statistics = layer_statistics(self.model, None if counts_LE is None else sum_over_ranks(counts_LE))
            raise DivergedError(nonfinite, self.global_step + 1, statistics)
        self.skipped_steps += 1
        self.zero_grad()  # optimizers do not update parameters without a gradient
        self.balancing_step = StepInProgress(self.balancing)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the number of skipped steps, and key the optimizer's state by parameter names.

        torch numbers the state in the order of the optimizer's groups; Lightning's FSDP2 expects the model's order.
        """
        checkpoint["skipped_steps"] = self.skipped_steps
        names = {parameter: name for name, parameter in self.named_parameters()}
        for optimizer, saved in zip(self.trainer.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            group_names = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            name_of = dict(enumerate(name for group in group_names for name in group))
            saved["state"] = {name_of.get(number, number): state for number, state in saved["state"].items()}
            for group, params in zip(saved["param_groups"], group_names, strict=True):
                group["params"] = params

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the number of skipped steps."""
        self.skipped_steps = checkpoint["skipped_steps"]

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its scheduler, which steps once per optimizer step."""
        optimizer, scheduler = build_optimizer(self.model, self.optim, self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Start every validation with empty sums."""
        self.totals = ValidationTotals()

    def validation_step(self, batch: ValidationBatch, batch_idx: int) -> None:
        """Add a batch of the validation split to the sums."""
        targets_BS = batch.windows_BT[:, 1:]
        head, routings = self(batch.windows_BT[:, :-1], targets_BS)
        if not len(batch.documents_BS):  # only other ranks have a batch left
            return
        target_bytes_N, documents_N = self.bytes_of_token_V[targets_BS.flatten()], batch.documents_BS.flatten()
        self.totals.add(head.nll_N, target_bytes_N, documents_N, routings)

    def on_validation_epoch_end(self) -> None:
        """Compute the metrics of the validation.

        Raises:
            DivergedError: a metric is not finite.
        """
        try:
            self.validation = self.totals.over_ranks().summary([router.weight_ED for router in self.model.routers])
        except ArithmeticError as error:
            statistics = layer_statistics(self.model, None)
            raise DivergedError(f"{error} of the validation", self.global_step, statistics) from None


@contextmanager
def keep_router_inputs(routers: Sequence[Router], wanted: bool) -> Iterator[None]:
    """Make every router keep its input within the block if `wanted`; a strategy may already require it."""
    previous = [router.keeps_input for router in routers]
    for router in routers:
        router.keeps_input |= wanted
    yield
    for router, keeps in zip(routers, previous, strict=True):
        router.keeps_input = keeps

"""The LightningModule: one step from tokens to the loss and back to the balancing strategy.

Shapes: B sequences, S sequence length, T = S + 1, N = B*S tokens, V vocabulary, L MoE layers, E experts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from simbal.balancing.composition import Composition
from simbal.balancing.step import StepInProgress
from simbal.data.loader import TrainBatches
from simbal.distributed import sum_over_ranks, whole
from simbal.model.head import HeadLoss, head_loss
from simbal.model.router import Routing
from simbal.model.transformer import Transformer
from simbal.training.divergence import DivergedError, layer_statistics
from simbal.training.parallel import shard, whole_routers
from simbal.training.validation import Validation, ValidationTotals


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer's numbers; `lr` is the peak."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    decay_router: bool
    warmup_steps: int


def lr_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak at `step` s of T, with W warm-up steps.

    0.1 + 0.9 s/W for s < W, then 0.1 + 0.45 (1 + cos(pi (s - W) / (T - W))); 0.1 from T on. A run with T <= W ends
    while the rate still rises.
    """
    if step < warmup_steps:
        return 0.1 + 0.9 * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, object]]:
    """Matrices decay, norm gains do not, routers as `decay_router` says, but never what parametrises a router."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        path = name.split(".")
        # decay would shrink the signs that torch keeps on the diagonal of an orthogonal parametrization, to 0
        decays = (
            parameter.ndim > 1 and (settings.decay_router or "router" not in path) and "parametrizations" not in path
        )
        (decayed if decays else plain).append(parameter)
    return [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, settings: OptimSettings, max_steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer and the schedule that sets its rate at each step."""
    groups = parameter_groups(model, settings)
    optimizer = torch.optim.AdamW(groups, settings.lr, settings.betas, settings.eps, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, settings.warmup_steps, max_steps))


class LitMoE(L.LightningModule):
    """loss = cross-entropy + z-loss + the terms of the balancing strategies.

    Lightning calls these in one optimizer step, in this order:

    1. `on_train_batch_start`, before every micro-batch: before the first of several, if a loss needs the counts of the
       whole step, `count_step` runs the model on all of them without gradients.
    2. `training_step`, for every micro-batch: the model, the counts, and the loss, of which Lightning then takes the
       gradient and adds it up.
    3. `optimizer_step`, which begins before the `training_step` of the last micro-batch; after it, still within
       a. `configure_gradient_clipping` clips the gradient; one that is not finite skips the step or ends the run;
       b. AdamW moves the weights;
       c. `finish_step` updates the strategies with the step's counts.
    4. The schedule moves the learning rate, as `configure_optimizers` says.
    """

    def __init__(
        self,
        model: Transformer,
        balancing: Composition,
        optim: OptimSettings,
        max_steps: int,
        z_loss_coef: float,
        grad_clip: float,
        bytes_of_token_V: Tensor,
        skip_nonfinite: int = 0,
    ) -> None:
        """
        Args:
            model: what is trained.
            balancing: the strategies.
            optim: the optimizer's numbers.
            max_steps: optimizer steps of the schedule.
            z_loss_coef: of the head's z-loss.
            grad_clip: largest norm of the gradient; 0: it is measured but not clipped.
            bytes_of_token_V: UTF-8 bytes that each token stands for.
            skip_nonfinite: how many steps whose loss or gradient is not finite are skipped, before the run diverges.
        """
        super().__init__()
        self.model, self.balancing, self.optim = model, balancing, optim
        self.max_steps, self.z_loss_coef, self.grad_clip = max_steps, z_loss_coef, grad_clip
        self.skip_nonfinite, self.skipped_steps = skip_nonfinite, 0
        self.bytes_of_token_V = nn.Buffer(bytes_of_token_V, persistent=False)
        self.balancing_step = StepInProgress(balancing)
        self.finished_counts_LE = torch.zeros(len(model.routers), model.shape.num_experts).long()  # of the last one
        self.step_loss = torch.zeros(())  # of the optimizer step in progress, summed over its micro-batches
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.validation: Validation | None = None

    def configure_model(self) -> None:
        """Called before every fit and validation; a device mesh is there if each rank is to hold a part."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[HeadLoss, list[Routing]]:
        """Loss of the language model alone, and every layer's routing."""
        hidden_BSD, routings = self.model(tokens_BS, self.balancing)
        loss = head_loss(hidden_BSD.flatten(0, 1), self.model.head_VD, targets_BS.flatten(), self.z_loss_coef)
        return loss, routings

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Before the first of several micro-batches, count all of them if a loss needs it."""
        accumulation = self.trainer.accumulate_grad_batches
        if self.balancing.needs_step_counts and accumulation > 1 and batch_idx % accumulation == 0:
            loader = cast(TrainBatches, self.trainer.train_dataloader)
            with self.trainer.precision_plugin.forward_context():
                self.count_step(window_BT.to(self.device) for window_BT in loader.micro_batches(self.global_step))

    def count_step(self, windows: Iterable[Tensor]) -> None:
        """The first of two passes over the step's micro-batches: `windows`, each (B, T), are those of this rank."""
        with self.balancing_step.counting_pass() as counting:
            for window_BT in windows:
                _, routings = self.model(window_BT[:, :-1], self.balancing)
                counting.add(routings)

    def training_step(self, window_BT: Tensor, batch_idx: int) -> dict[str, Any]:
        """`window_BT` holds the inputs and, shifted by one, the targets."""
        head, routings = self(window_BT[:, :-1], window_BT[:, 1:])
        self.balancing_step.add(routings)
        aux = self.balancing_step.losses(routings, self.global_step)
        loss = torch.stack([head.loss, *aux.values()]).sum()
        self.step_loss = self.step_loss.to(loss.device) + loss.detach()
        return {"loss": loss, "total": loss.detach(), "ce": head.nll_N.mean(), "aux": aux}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """After the optimizer, and once for all its micro-batches, the strategies see what they measured."""
        step = self.global_step
        super().optimizer_step(*args, **kwargs)
        self.finish_step(step, self.trainer.optimizers[0].param_groups[0]["lr"])

    def finish_step(self, step: int, lr: float) -> None:
        """Optimizer step `step` is done, at rate `lr`."""
        done, self.balancing_step = self.balancing_step, StepInProgress(self.balancing)
        self.step_loss = torch.zeros(())
        if done.counts_LE is not None:
            self.finished_counts_LE = done.counts_LE
        with whole_routers(self.model) as weights:
            done.finish(weights, lr, step)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the norm of the whole gradient, and keep what it was before.

        Raises:
            DivergedError: loss or gradient are not finite, and no more steps may be skipped.
        """
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        self.grad_norm, loss = whole(norm), sum_over_ranks(self.step_loss)
        if (self.grad_norm + loss).isfinite():
            nn.utils.clip_grads_with_norm_(self.parameters(), self.grad_clip or float("inf"), norm)
        else:
            self._skip_step(loss)

    def _skip_step(self, loss: Tensor) -> None:
        """Neither weights nor strategies learn from it."""
        if self.skipped_steps == self.skip_nonfinite:
            what = "the gradient" if loss.isfinite() else "the loss"
            counts_LE = self.balancing_step.counts_LE
            statistics = layer_statistics(self.model, None if counts_LE is None else sum_over_ranks(counts_LE))
            raise DivergedError(what, self.global_step + 1, statistics)
        self.skipped_steps += 1
        self.zero_grad()  # an optimizer leaves alone what has no gradient
        self.balancing_step = StepInProgress(self.balancing)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The count goes on when the run does."""
        checkpoint["skipped_steps"] = self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As saved."""
        self.skipped_steps = checkpoint["skipped_steps"]

    def configure_optimizers(self) -> Any:
        """The schedule moves once per optimizer step."""
        optimizer, scheduler = build_optimizer(self.model, self.optim, self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Every validation starts from nothing."""
        self.totals = ValidationTotals()

    def validation_step(self, window_BT: Tensor, batch_idx: int) -> None:
        """`window_BT` as in training."""
        targets_BS = window_BT[:, 1:]
        head, routings = self(window_BT[:, :-1], targets_BS)
        self.totals.add(head.nll_N, self.bytes_of_token_V[targets_BS.flatten()], routings)

    def on_validation_epoch_end(self) -> None:
        """`self.validation` holds the newest numbers; DivergedError if the loss is not finite."""
        try:
            self.validation = self.totals.over_ranks().summary([router.weight_ED for router in self.model.routers])
        except ArithmeticError:
            statistics = layer_statistics(self.model, None)
            raise DivergedError("the validation loss", self.global_step, statistics) from None

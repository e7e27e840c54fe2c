"""The LightningModule: one step from tokens to the loss and back to the balancing strategy.

Shapes: B sequences, S sequence length, T = S + 1, N = B*S tokens, V vocabulary, L MoE layers, E experts.
"""

from collections.abc import Iterable
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from simbal.balancing.composition import Composition
from simbal.data.loader import TrainBatches
from simbal.model.head import HeadLoss, head_loss
from simbal.model.router import Routing
from simbal.model.transformer import Transformer
from simbal.training.divergence import DivergedError, layer_statistics
from simbal.training.optim import OptimSettings, build_optimizer
from simbal.training.parallel import shard, whole_routers
from simbal.training.ranks import sum_over_ranks, whole, world_size
from simbal.training.step_totals import StepTotals
from simbal.training.validation import Validation, ValidationTotals


class LitMoE(L.LightningModule):
    """loss = cross-entropy + z-loss + the terms of the balancing strategies."""

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
        self.step_totals = StepTotals()  # of the optimizer step in progress
        self.foreseen: dict[str, Tensor] | None = None  # what the strategies will have measured when it ends
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
        """Before the first of several micro-batches, look through all of them if a strategy needs it."""
        accumulation = self.trainer.accumulate_grad_batches
        if self.balancing.foresees and accumulation > 1 and batch_idx % accumulation == 0:
            loader = cast(TrainBatches, self.trainer.train_dataloader)
            with self.trainer.precision_plugin.forward_context():
                self.foresee(window_BT.to(self.device) for window_BT in loader.micro_batches(self.global_step))

    @torch.no_grad()
    def foresee(self, windows: Iterable[Tensor]) -> None:
        """What the strategies will measure in the step made of this rank's `windows_BT`."""
        totals = StepTotals()
        for window_BT in windows:
            _, routings = self.model(window_BT[:, :-1], self.balancing)
            totals.add(self.balancing.measure(routings), routings)
        self.foreseen = totals.over_ranks()

    def training_step(self, window_BT: Tensor, batch_idx: int) -> dict[str, Any]:
        """`window_BT` holds the inputs and, shifted by one, the targets."""
        head, routings = self(window_BT[:, :-1], window_BT[:, 1:])
        measured = self.balancing.measure(routings)
        foreseen = self.foreseen
        if self.balancing.foresees and foreseen is None:  # this micro-batch is the whole step
            foreseen = {name: sum_over_ranks(measured_LE) for name, measured_LE in measured.items()}
        aux = self.balancing.losses(routings, self.global_step, foreseen)
        loss = torch.stack([head.loss, *aux.values()]).sum()
        self.step_totals.add(measured, routings)
        self.step_loss = self.step_loss.to(loss.device) + loss.detach()
        return {"loss": loss, "total": loss.detach(), "ce": head.nll_N.mean(), "aux": aux}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """After the optimizer, and once for all its micro-batches, the strategies see what they measured."""
        step = self.global_step
        super().optimizer_step(*args, **kwargs)
        self.finish_step(step, self.trainer.optimizers[0].param_groups[0]["lr"])

    def finish_step(self, step: int, lr: float) -> None:
        """Optimizer step `step` is done, at rate `lr`."""
        totals, self.step_totals, self.foreseen = self.step_totals, StepTotals(), None
        self.step_loss = torch.zeros(())
        if totals.counts_LE is not None:
            self.finished_counts_LE = totals.counts_LE
        with whole_routers(self.model) as weights:
            self.balancing.update(totals.over_ranks(), totals.micro_batches * world_size(), weights, lr, step)

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
            counts_LE = self.step_totals.counts_LE
            statistics = layer_statistics(self.model, None if counts_LE is None else sum_over_ranks(counts_LE))
            raise DivergedError(what, self.global_step + 1, statistics)
        self.skipped_steps += 1
        self.zero_grad()  # an optimizer leaves alone what has no gradient
        self.step_totals = StepTotals()

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

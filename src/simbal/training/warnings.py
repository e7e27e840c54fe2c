"""Warnings for runs that succeed: changed devices or precision, bf16 updates that round to zero, and overclipping."""

# mypy: disable-error-code="override"
# Lightning's hooks take any LightningModule; here it is always a LitMoE

import logging
from collections.abc import Sequence
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from simbal.config.schema import OptimConfig
from simbal.distributed import is_rank_zero, sum_over_ranks, world_size
from simbal.model.transformer import Transformer
from simbal.training.module import LitMoE

log = logging.getLogger("simbal")
STEPS_AFTER_WARMUP = 100  # steps after warm-up until bf16 weights are compared
MOVED_FRACTION = 0.01  # warn if a smaller fraction of a weight's entries has changed
MAX_ENTRIES = 4096  # compared entries per weight, to keep the copy small
MIN_CLIP_FACTOR = 0.01  # below, AdamW's `eps` matters: see results/old_bench


class DeviceChanges(Callback):
    """Lets a run resume with a different number of devices or precision, and warns that rounding has changed."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, Any]] = {"devices": {}, "precision": {}}  # values by first step

    @property
    def warnings(self) -> list[str]:
        """A warning for the devices and for the precision, if they changed."""
        return [
            f"{what} changed, which affects rounding: "
            + ", ".join(f"{value} from step {step}" for step, value in values.items())
            for what, values in self.history.items()
            if len(values) > 1
        ]

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Record the number of devices and the precision if they changed."""
        for what, value in (("devices", world_size()), ("precision", str(trainer.precision))):
            values = self.history[what]
            if not values or [*values.values()][-1] != value:
                values[trainer.global_step] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return self.history

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        self.history = state_dict

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Rescale the number of finished micro-batches to the current number of devices.

        Lightning uses it to find the last micro-batch of a step.
        """
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            difference = checkpoint["global_step"] * trainer.accumulate_grad_batches - counts["ready"]
            counts |= {name: count + difference for name, count in counts.items()}


class RoundingWarning(Callback):
    """Warns once about bf16 weights that do not change because their updates round to zero.

    bf16 has 8 significant bits: a norm gain of 1 can only change by at least 1/256, while AdamW's updates are about the
    learning rate. Weights are compared `STEPS_AFTER_WARMUP` steps after warm-up, or after the last step.
    Reference: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.1.
    """

    def __init__(self, warmup_steps: int, max_steps: int, lr: float) -> None:
        self.step, self.lr = min(warmup_steps + STEPS_AFTER_WARMUP, max_steps), lr
        self.warnings: list[str] = []
        self._start: dict[str, Tensor] = {}
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, module: LitMoE) -> None:
        """Copy the entries to compare with."""
        self._first_step = trainer.global_step
        self._start = {name: entries.clone() for name, entries in bf16_entries(module.model).items()}

    def on_train_batch_end(self, trainer: L.Trainer, module: LitMoE, *_: object) -> None:
        """Compare the weights once; a run that resumed after `step` compares them at its last step."""
        due = self.step if self._first_step < self.step else trainer.max_steps
        if not self._start or trainer.global_step < due:
            return
        unchanged = []
        for name, entries in bf16_entries(module.model).items():
            counts = torch.tensor([int((entries != self._start[name]).sum()), entries.numel()])
            changed, total = sum_over_ranks(counts).tolist()
            if changed < MOVED_FRACTION * total:
                unchanged.append(name)
        if unchanged:
            self.warnings = [
                f"{len(unchanged)} of {len(self._start)} weights did not change in {due - self._first_step} steps "
                f"(such as {', '.join(unchanged[:3])}): updates of optim.lr={self.lr:g} round to zero in bf16; "
                "use trainer.precision=bf16-mixed"
            ]
            if is_rank_zero():
                log.warning("%s", self.warnings[0])
        self._start = {}


@torch.no_grad()
def bf16_entries(model: Transformer) -> dict[str, Tensor]:
    """Return evenly spaced entries of every trained bf16 weight by name, of this rank's shard.

    An untied embedding is left out: rows of tokens that do not occur never change.
    """
    excluded = None if model.shape.tie_embeddings else model.embedding.weight
    entries_by_name = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16 and parameter is not excluded:
            entries = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().flatten()
            entries_by_name[name] = entries[:: max(1, len(entries) // MAX_ENTRIES)]
    return entries_by_name


def warn_overclipping(clip_factors: Sequence[float], optim: OptimConfig) -> list[str]:
    """Return a warning if clipping made gradients so small that AdamW's `eps` matters.

    An auxiliary loss with a large gradient causes this, and changes the updates of unrelated weights.

    Args:
        clip_factors: the factors by which clipping scaled the gradients of the logged steps.
        optim: the settings of the optimizer.
    """
    if not clip_factors or median(clip_factors) >= MIN_CLIP_FACTOR:
        return []
    return [
        f"optim.grad_clip={optim.grad_clip:g} divided the gradients by {1 / median(clip_factors):,.0f} (median), "
        f"probably because an auxiliary loss has a large gradient; optim.eps={optim.eps:g} is no longer small "
        "compared with the other gradients: set optim.grad_clip=0"
    ]

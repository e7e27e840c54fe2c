"""Small callbacks: pruning by a search, a changed number of devices, and warnings for runs that succeed."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from simbal.config.schema import OptimConfig
from simbal.distributed import is_rank_zero, max_over_ranks, on_rank_zero, sum_over_ranks, world_size
from simbal.model.moe import BIASES
from simbal.model.transformer import Transformer
from simbal.runs.folder import PRUNE_FILE
from simbal.training.module import LitMoE
from simbal.training.signals import PrunedError

log = logging.getLogger("simbal")
STEPS_AT_PEAK = 100  # after the warm-up, until bf16 weights are compared
FEW = 0.01  # of the entries
ENTRIES = 4096  # of each weight that are compared, so that the copy of them is small
LEAST_CLIPPED = 0.01  # below this factor, AdamW's `eps` is no longer small beside the gradient: results/bench_grid


class TrialPruning(Callback):
    """Stops the run once the sweep has written prune.json; rank zero looks for it before every batch, in microseconds.

    A file from before this process is stale: the sweep writes again what still holds.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / PRUNE_FILE

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Remove a prune.json that an earlier sweep has left."""
        if is_rank_zero():
            self.file.unlink(missing_ok=True)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop if there is a prune.json.

        Raises:
            PrunedError: there is one; it says why.
        """
        if max_over_ranks(is_rank_zero() and self.file.exists()):
            reason = on_rank_zero(self._read)
            raise PrunedError(f"{reason}; stopped at step {trainer.global_step}")

    def _read(self) -> str:
        reason = str(json.loads(self.file.read_bytes())["reason"])
        self.file.unlink()
        return reason


class DeviceChanges(Callback):
    """Lets a run resume on another number of devices or in another precision, and records from which step on."""

    def __init__(self) -> None:
        # by the number of steps that were done before
        self.devices: dict[int, int] = {}
        self.precisions: dict[int, str] = {}

    @property
    def warnings(self) -> list[str]:
        """A sentence for each of the two that has changed, as that changes the rounding."""
        found = []
        for what, since in (("devices", self.devices), ("precision", self.precisions)):
            spans = ", ".join(f"{value} from step {step}" for step, value in since.items())
            found += [f"{what} changed, and with it the rounding: {spans}"] if len(since) > 1 else []
        return found

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the number of devices and the precision if they have changed."""
        _note(self.devices, trainer.global_step, world_size())
        _note(self.precisions, trainer.global_step, str(trainer.precision))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds."""
        return {"devices": self.devices, "precisions": self.precisions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        self.devices, self.precisions = {**state_dict["devices"]}, {**state_dict["precisions"]}

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Count the finished micro-batches as if there had always been this many devices.

        Lightning finds the last micro-batch of a step by that number.
        """
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            more = checkpoint["global_step"] * trainer.accumulate_grad_batches - counts["ready"]
            counts |= {name: count + more for name, count in counts.items()}


def _note(since: dict[int, Any], step: int, value: Any) -> None:
    if not since or [*since.values()][-1] != value:
        since[step] = value


class RoundingWarning(Callback):
    """Warns once of bf16 weights that do not move, because steps below half a unit in the last place round to nothing.

    A bf16 number has 8 significant bits: a norm gain of 1 moves by at least 1/256, AdamW by about the learning rate.
    Weights are compared `STEPS_AT_PEAK` steps after the warm-up, or after the last step.
    Reference: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.1.
    """

    def __init__(self, warmup_steps: int, max_steps: int, lr: float) -> None:
        self.step, self.lr = min(warmup_steps + STEPS_AT_PEAK, max_steps), lr
        self.warnings: list[str] = []
        self._start: dict[str, Tensor] = {}
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the entries to compare with."""
        assert isinstance(module, LitMoE)
        self._first_step = trainer.global_step
        self._start = {name: entries.clone() for name, entries in bf16_entries(module.model).items()}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Compare at the step that is due, on every rank alike; a run resumed after it compares at its last step."""
        assert isinstance(module, LitMoE)
        due = self.step if self._first_step < self.step else trainer.max_steps
        if not self._start or trainer.global_step < due:
            return
        steps = trainer.global_step - self._first_step
        counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.int64))
        for name, entries in bf16_entries(module.model).items():
            moved = int((entries != self._start[name]).sum())
            counts[kind(name)] += torch.tensor([moved, entries.numel()])
        self._start = {}
        for of_kind, moved_and_all in counts.items():
            moved, total = sum_over_ranks(moved_and_all).tolist()
            if moved < FEW * total:
                self.warnings.append(
                    f"only {moved:,} of {total:,} entries of the {of_kind} moved in {steps} steps: updates of "
                    f"optim.lr={self.lr:g} round to zero in bf16; use trainer.precision=bf16-mixed"
                )
        for sentence in self.warnings if is_rank_zero() else ():
            log.warning(sentence)


@torch.no_grad()
def bf16_entries(model: Transformer) -> dict[str, Tensor]:
    """Return evenly spread entries of every trained bf16 weight by its name, of this rank's part of it.

    An untied embedding is left out: rows of tokens that have not occurred do not move in any precision.
    """
    left_out = None if model.shape.tie_embeddings else model.embedding.weight
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16 and parameter is not left_out:
            entries = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().flatten()
            found[name] = entries[:: max(1, len(entries) // ENTRIES)]
    return found


def kind(name: str) -> str:
    """Return what a weight of a Transformer is called in a sentence."""
    if name.rpartition(".")[2] in BIASES:
        return "biases"
    kinds = {"norm": "norm gains", "router": "routers", "attention": "attention", "feed_forward": "feed-forwards"}
    return next((plural for part, plural in kinds.items() if part in name), "head")


def warn_overclipping(clipped: Sequence[float], optim: OptimConfig) -> Iterator[str]:
    """Yield a warning if clipping made the gradients so small that AdamW's `eps` is no longer small beside them.

    The long gradient of an auxiliary loss does that, and changes the steps of weights it has nothing to do with.

    Args:
        clipped: the factors by which the gradients of the logged steps were scaled.
        optim: the optimizer's config.
    """
    if clipped and median(clipped) < LEAST_CLIPPED:
        yield (
            f"optim.grad_clip={optim.grad_clip:g} divided the gradients by {1 / median(clipped):,.0f} (median), "
            "probably because of the long gradient of an auxiliary loss: optim.eps="
            f"{optim.eps:g} is no longer small beside the rest; set optim.grad_clip=0"
        )

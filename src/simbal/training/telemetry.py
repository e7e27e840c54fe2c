"""The curves of a run: metrics.jsonl, the tracker and progress.json.

Values stay on the device between logged steps, so that watching a run does not slow it down.
"""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simbal.data.loader import TokenData
from simbal.distributed import is_rank_zero, on_rank_zero, sum_over_ranks
from simbal.files.disk import write_json, write_text
from simbal.metrics.definitions import SETTLING, SIMILARITY
from simbal.metrics.routing import max_vio
from simbal.model.expert_similarity import record_similarity
from simbal.runs import curves
from simbal.runs.folder import CURVES_FILE
from simbal.runs.record import digest, is_digest
from simbal.training.module import LitMoE, StepResult
from simbal.training.trackers import Tracker
from simbal.training.validation import Validation


@dataclass(frozen=True)
class PES:
    """The measurement of PES, at every `every`-th step (0: never), on `tokens` tokens drawn from the validation split.

    Every rank measures the same.
    """

    every: int
    tokens: int

    def due(self, step: int, module: LitMoE) -> bool:
        """Whether to measure after `step`."""
        return self.measures(module) and step % self.every == 0

    def measures(self, module: LitMoE) -> bool:
        """Whether the run's PES is measured at all; there are no pairs in a model of fewer than two experts."""
        return self.every > 0 and module.model.shape.num_experts >= 2

    @torch.no_grad()
    def measure(self, trainer: L.Trainer, module: LitMoE) -> dict[str, Any]:
        """Measure in evaluation mode, and leave everything that the run depends on as it was.

        Returns:
            A part of a row of metrics.jsonl: `val/min_pes`, `val/mean_pes` and, in `layers`, `val/pes` of each layer.
        """
        data, training = cast(TokenData, trainer.datamodule), module.training  # type: ignore[attr-defined]
        module.eval()
        try:
            with (
                trainer.precision_plugin.forward_context(),
                record_similarity(module.model.feed_forwards) as seen,
            ):
                for batch in data.held_out_of_all_ranks(self.tokens):
                    module.model(batch.windows_BT[:, :-1].to(module.device), module.balancing)
        finally:
            module.train(training)
        pes_L = seen.similarity_LN.mean(1).tolist()
        metrics = {metric.key: metric.over_layers(pes_L) for metric in SIMILARITY if metric.over_layers}
        return metrics | {"layers": {"val/pes": pes_L}}


class Telemetry(Callback):
    """The `Observer` that writes a row at every `log_every`-th step and the last, and one for each validation.

    Of several ranks the first writes and reads the files; the others know what it does.
    """

    def __init__(self, folder: Path, log_every: int, max_steps: int, tokens_per_step: int, pes: PES) -> None:
        self.pes = pes
        self.validation: Validation | None = None  # the newest of this process
        self.tracker: Tracker | None = None
        self.folder, self.file = folder, folder / CURVES_FILE
        self.log_every, self.max_steps, self.tokens_per_step = log_every, max_steps, tokens_per_step
        self.seconds, self.steps = 0.0, 0  # spent in training steps by this process
        self._shown: dict[str, str] = {}
        self._finished: StepResult | None = None  # if the newest micro-batch has completed a step
        self._logged_steps, self._logged_seconds = 0, 0.0

    @property
    def tokens_per_second(self) -> float:
        """The speed: harmonic mean over the rows of metrics.jsonl, those of earlier processes included."""
        key = "tokens_per_second"
        return on_rank_zero(lambda: float(harmonic_mean([row[key] for row in self.rows() if key in row])))

    def settling(self) -> dict[str, float]:
        """Return how the load of the experts has settled; nothing of a model without routers, or of a short run."""
        rows = on_rank_zero(self.rows)
        curve = [(row["step"], row["train/max_vio"]) for row in rows if "train/max_vio" in row]
        found = {metric.key: metric.of_curve(curve) for metric in SETTLING if metric.of_curve}
        return {key: value for key, value in found.items() if value is not None}

    def clipped(self) -> list[float]:
        """Return the factors by which clipping has scaled the gradient, at the logged steps that were made."""
        return [row["train/clipped"] for row in on_rank_zero(self.rows) if "train/clipped" in row]

    @property
    def shown(self) -> str:
        """The newest losses and speed, for a progress bar."""
        return "  ".join(self._shown.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the size and the digest of metrics.jsonl, once it is on the disk, to be saved in a checkpoint."""
        if not is_rank_zero():  # only the first rank's checkpoint is written
            return {}
        if not self.file.exists():
            return digest(b"")
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
            return digest(file.read())

    def trouble(self, state: dict[str, Any]) -> str | None:
        """Return what is wrong with the rows that were there when `state` was saved, or None."""
        whole = is_digest(state) and digest(self._written()[: state["bytes"]]) == state
        return None if whole else f"the rows of {self.file.name} before it are damaged"

    def rewind(self, state: dict[str, Any]) -> None:
        """Drop the rows that a killed run wrote after `state` was saved; all of them if it is empty."""
        if is_rank_zero() and self.file.exists():
            write_text(self.file, self._written()[: state.get("bytes", 0)].decode("utf-8"))

    def _written(self) -> bytes:
        """Return what metrics.jsonl holds."""
        return self.file.read_bytes() if self.file.exists() else b""

    def validated(self, step: int) -> bool:
        """Whether metrics.jsonl has a validation row of `step`."""
        return on_rank_zero(lambda: any(row["step"] == step and "val/loss" in row for row in self.rows()))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; `UserError` if it is broken."""
        return curves.rows(self.folder)

    def wants_aux_gradient(self, number: int) -> bool:
        """Whether step `number` is logged."""
        return self._logs(number)

    def observe_step(self, step: StepResult) -> None:
        """Keep a finished step for `on_train_batch_end`."""
        self._finished = step

    def observe_validation(self, validation: Validation) -> None:
        """Keep the newest validation, whose step `log_validation` is given."""
        self.validation = validation

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of this micro-batch; before the first step, measure the PES of the start."""
        assert isinstance(module, LitMoE)
        first = trainer.global_step == 0 and batch_idx == 0
        if first and self.pes.due(0, module):
            self._write(trainer, self._place(0) | self.pes.measure(trainer, module))
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Write a row when a logged step is complete."""
        assert isinstance(module, LitMoE)
        step, self._finished = self._finished, None
        logged = step is not None and self._logs(step.number)
        row = self._row(step, trainer.optimizers[0].param_groups[0]["lr"]) if step and logged else {}
        self.seconds += time.perf_counter() - self._started
        if step is None:
            return
        self.steps += 1
        pes = self.pes.measure(trainer, module) if self.pes.due(step.number, module) else {}
        if row:
            self._log(trainer, row | pes)
        elif pes:
            self._write(trainer, self._place(step.number) | pes)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the row of a validation between two steps."""
        if trainer.state.fn == "fit":
            self.log_validation(trainer, trainer.global_step)

    def log_validation(self, trainer: L.Trainer, step: int) -> None:
        """Write the row of the newest validation, made after step `step`, all layers included."""
        assert self.validation is not None
        metrics = {key: value for key, value in self.validation.metrics.items() if value is not None}
        self._write(trainer, self._place(step) | metrics | {"layers": self.validation.layers})
        self._shown["val"] = f"val {metrics['val/loss']:.3f}"

    def _logs(self, number: int) -> bool:
        return number % self.log_every == 0 or number == self.max_steps

    def _place(self, step: int) -> dict[str, Any]:
        return {"step": step, "tokens": step * self.tokens_per_step}

    def _row(self, step: StepResult, lr: float) -> dict[str, Any]:
        row = self._place(step.number) | {f"train/{name}": mean for name, mean in step.mean_losses().items()}
        row["train/grad_norm"] = step.grad_norm.item()
        row["train/clipped"] = step.clipped.item()
        if step.aux_grad_norm is not None:
            row["train/aux_grad_norm"] = step.aux_grad_norm.item()
        if step.counts_LE is not None:
            row["train/max_vio"] = max_vio(sum_over_ranks(step.counts_LE)).mean().item()
        if step.skipped_steps is not None:
            row["train/skipped_steps"] = step.skipped_steps
        row["lr"] = lr
        return {key: value for key, value in row.items() if math.isfinite(value)}  # those of a skipped step may not be

    def _log(self, trainer: L.Trainer, row: dict[str, Any]) -> None:
        steps, seconds = self.steps - self._logged_steps, self.seconds - self._logged_seconds
        self._logged_steps, self._logged_seconds = self.steps, self.seconds
        row["tokens_per_second"] = steps * self.tokens_per_step / seconds
        self._write(trainer, row)
        self._shown["train"] = f"loss {row.get('train/ce', math.nan):.3f}  {row['tokens_per_second']:,.0f} tokens/s"
        remaining = (self.max_steps - row["step"]) * self.seconds / self.steps
        progress = {
            "phase": "training", "step": row["step"], "max_steps": self.max_steps, "loss": row.get("train/ce"),
            "tokens_per_second": row["tokens_per_second"], "seconds_left": remaining,
        }  # fmt: skip
        if is_rank_zero():
            write_json(self.folder / "progress.json", progress)

    def _write(self, trainer: L.Trainer, row: dict[str, Any]) -> None:
        if not is_rank_zero():
            return
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.add_row(row)


class ProgressBar(Callback):
    """A bar that shows steps, losses, tokens/s and time left, as `Telemetry` last measured them."""

    def __init__(self, telemetry: Telemetry, description: str) -> None:
        self.telemetry = telemetry
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.task = self.progress.add_task(description, total=None, shown="")

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the bar at the step at which the run starts."""
        self.progress.update(self.task, total=trainer.max_steps, completed=trainer.global_step)
        self.progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Move the bar on."""
        self.progress.update(self.task, completed=trainer.global_step, shown=self.telemetry.shown)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop the bar, which stays on the screen with the last losses, also after an error."""
        self.progress.update(self.task, shown=self.telemetry.shown)
        self.progress.stop()

"""The callbacks of a run: metrics.jsonl, progress bar and pruning."""

# mypy: disable-error-code="override"
# Lightning's hooks take any LightningModule; here it is always a LitMoE

import json
import math
import os
import time
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simbal.config.schema import TrainerConfig
from simbal.data.loader import TokenData
from simbal.distributed import is_rank_zero, max_over_ranks, on_rank_zero, sum_over_ranks
from simbal.metrics.definitions import SETTLING, SIMILARITY
from simbal.metrics.routing import max_vio
from simbal.model.expert_similarity import record_similarity
from simbal.runs import curves
from simbal.runs.atomic import write_json, write_text
from simbal.runs.folder import CURVES_FILE, PRUNE_FILE
from simbal.runs.record import PROGRESS_FILE, digest
from simbal.runs.spec import RunSpec
from simbal.training.checkpoint import Checkpoints
from simbal.training.module import LitMoE, StepResult
from simbal.training.signals import PrunedError
from simbal.training.trackers import Tracker
from simbal.training.validation import ValidationSchedule
from simbal.training.warnings import DeviceChanges, RoundingWarning


class MetricsLogger(Callback):
    """Writes metrics.jsonl and progress.json: a row every `log_every` steps, at the last step and per validation.

    Rank zero writes and reads the files. Tensors stay on the device between logged steps. Lightning's `self.log` is not
    used because it costs 0.37 ms per metric and step.
    """

    def __init__(self, folder: Path, config: TrainerConfig, tokens_per_step: int, tracker: Tracker) -> None:
        """Set what to log and where.

        Args:
            folder: the run's folder.
            config: the steps at which to log and to measure PES.
            tokens_per_step: training tokens of an optimizer step.
            tracker: also receives every row.
        """
        self.folder, self.file, self.config, self.tracker = folder, folder / CURVES_FILE, config, tracker
        self.tokens_per_step = tokens_per_step
        self.seconds, self.steps = 0.0, 0  # training time and steps since the last row
        self._status: dict[str, str] = {}

    @property
    def status(self) -> str:
        """The latest losses and speed, for the progress bar."""
        return "  ".join(self._status.values())

    def is_logged(self, step: int) -> bool:
        """Whether a step, counted from 1, has a row."""
        return step % self.config.log_every == 0 or step == self.config.max_steps

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, on every rank."""
        return on_rank_zero(lambda: curves.rows(self.folder))

    def has_validation(self, step: int) -> bool:
        """Whether metrics.jsonl has a validation after `step`."""
        return on_rank_zero(lambda: any(row["step"] == step and "val/loss" in row for row in curves.rows(self.folder)))

    def state_dict(self) -> dict[str, Any]:
        """Sync metrics.jsonl to disk and return its size and SHA-256 for the checkpoint."""
        if not is_rank_zero():  # only rank zero's state is saved
            return {}
        if not self.file.exists():
            return digest(b"")
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
            return digest(file.read())

    def find_damage(self, state: Any) -> str | None:
        """Return a message if the rows written before `state` was saved are damaged, else None."""
        content = self.file.read_bytes() if self.file.exists() else b""
        if state and digest(content[: state["bytes"]]) == state:
            return None
        return f"the rows of {self.file.name} before it are damaged"

    def rewind(self, state: dict[str, Any] | None) -> None:
        """Drop the rows that a killed process wrote after `state` was saved; without a state, drop all rows."""
        if is_rank_zero() and self.file.exists():
            size = state["bytes"] if state else 0
            write_text(self.file, self.file.read_bytes()[:size].decode("utf-8"))

    def setup(self, trainer: L.Trainer, module: LitMoE, stage: str) -> None:
        """Ask the module for the gradient of the auxiliary losses in logged steps."""
        module.measures_aux_gradient = self.is_logged

    def on_train_batch_start(self, trainer: L.Trainer, module: LitMoE, batch: Any, batch_idx: int) -> None:
        """Start timing the micro-batch; before the first step, measure PES."""
        if trainer.global_step == 0 and batch_idx == 0 and self._measures_pes(module):
            self._write(self._place(0) | measure_pes(trainer, module, self.config.pes_tokens))
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: LitMoE, *_: Any) -> None:
        """Write a row after an optimizer step that is logged or has a measurement of PES."""
        result, row, pes = module.step_result, {}, {}
        if result and self.is_logged(result.number):
            row = training_metrics(result)
            row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.seconds += time.perf_counter() - self._started
        if result is None:
            return
        self.steps += 1
        if row:
            row["tokens_per_second"] = self.steps * self.tokens_per_step / self.seconds
            self.seconds, self.steps = 0.0, 0
        if self._measures_pes(module) and result.number % self.config.pes_every == 0:
            pes = measure_pes(trainer, module, self.config.pes_tokens)
        if row or pes:
            self._write(self._place(result.number) | row | pes)
        if row:
            self._write_progress(result.number, row)

    def on_validation_end(self, trainer: L.Trainer, module: LitMoE) -> None:
        """Write a row for a validation during training."""
        if trainer.state.fn == "fit":
            self.log_validation(module, trainer.global_step)

    def log_validation(self, module: LitMoE, step: int) -> None:
        """Write a row for the module's latest validation, which followed `step`."""
        assert module.validation is not None
        metrics = {key: value for key, value in module.validation.metrics.items() if value is not None}
        self._write(self._place(step) | metrics | {"layers": module.validation.layers})
        self._status["val"] = f"val {metrics['val/loss']:.3f}"

    def final_metrics(self, trainer: L.Trainer, module: LitMoE) -> dict[str, Any]:
        """Return `metrics`, `layers` and `tokens_per_second` of the record, after the last validation.

        The speed is the harmonic mean over all rows, including rows of earlier processes.
        """
        assert module.validation is not None
        rows = self.rows()
        load = [(row["step"], row["train/max_vio"]) for row in rows if "train/max_vio" in row]
        settling = {metric.key: metric.of_curve(load) for metric in SETTLING if metric.of_curve}
        metrics: dict[str, float | None] = {**module.validation.metrics}
        metrics |= {key: value for key, value in settling.items() if value is not None}  # None in a short run
        layers = module.validation.layers
        if self._measures_pes(module):
            similarity = measure_pes(trainer, module, self.config.pes_tokens)
            layers = layers | similarity.pop("layers")
            metrics |= similarity
        speed = harmonic_mean([row["tokens_per_second"] for row in rows if "tokens_per_second" in row])
        return {"metrics": metrics, "layers": layers, "tokens_per_second": float(speed)}

    def _measures_pes(self, module: LitMoE) -> bool:
        return self.config.pes_every > 0 and module.model.shape.num_experts >= 2  # PES compares pairs of experts

    def _place(self, step: int) -> dict[str, Any]:
        return {"step": step, "tokens": step * self.tokens_per_step}

    def _write(self, row: dict[str, Any]) -> None:
        if not is_rank_zero():
            return
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.tracker.add_row(row)

    def _write_progress(self, step: int, row: dict[str, Any]) -> None:
        speed, max_steps = row["tokens_per_second"], self.config.max_steps
        self._status["train"] = f"loss {row.get('train/ce', math.nan):.3f}  {speed:,.0f} tokens/s"
        progress = {
            "phase": "training",
            "step": step,
            "max_steps": max_steps,
            "loss": row.get("train/ce"),
            "tokens_per_second": speed,
            "seconds_left": (max_steps - step) * self.tokens_per_step / speed,
        }
        if is_rank_zero():
            write_json(self.folder / PROGRESS_FILE, progress)


def training_metrics(result: StepResult) -> dict[str, float]:
    """Return the metrics of a step for a row of metrics.jsonl, without NaN and infinite values."""
    row = {f"train/{name}": mean for name, mean in result.mean_losses().items()}
    row |= {"train/grad_norm": result.grad_norm.item(), "train/clipped": result.clipped.item()}
    if result.aux_grad_norm is not None:
        row["train/aux_grad_norm"] = result.aux_grad_norm.item()
    if result.counts_LE is not None:
        row["train/max_vio"] = max_vio(sum_over_ranks(result.counts_LE)).mean().item()
    if result.skipped_steps is not None:
        row["train/skipped_steps"] = result.skipped_steps
    return {key: value for key, value in row.items() if math.isfinite(value)}


@torch.no_grad()
def measure_pes(trainer: L.Trainer, module: LitMoE, tokens: int) -> dict[str, Any]:
    """Measure the similarity of experts (PES) on `tokens` tokens of the validation split, without affecting training.

    Every rank measures the same tokens.

    Returns:
        `val/min_pes`, `val/mean_pes` and, under `layers`, `val/pes` of each layer.
    """
    data, training = cast(TokenData, trainer.datamodule), module.training  # type: ignore[attr-defined]
    module.eval()
    try:
        with trainer.precision_plugin.forward_context(), record_similarity(module.model.feed_forwards) as seen:
            for batch in data.validation_batches(tokens, all_ranks=True):
                module.model(batch.windows_BT[:, :-1].to(module.device), module.balancing)
    finally:
        module.train(training)
    pes_L = seen.similarity_LN.mean(1).tolist()
    metrics = {metric.key: metric.over_layers(pes_L) for metric in SIMILARITY if metric.over_layers}
    return metrics | {"layers": {"val/pes": pes_L}}


class ProgressBar(Callback):
    """Shows steps, losses, tokens/s and the remaining time on rank zero."""

    def __init__(self, metrics: MetricsLogger, checkpoints: Checkpoints, description: str, enabled: bool) -> None:
        self.metrics, self.checkpoints, self.enabled = metrics, checkpoints, enabled
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.task = self.progress.add_task(description, total=None, status="")

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Show the bar at the step from which the run starts or resumes."""
        if self.enabled and is_rank_zero():
            self.progress.update(self.task, total=trainer.max_steps, completed=trainer.global_step)
            task = self.progress.tasks[self.task]
            task.start_time = (task.start_time or 0.0) - self.checkpoints.earlier  # shows the total time at the end
            self.progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Advance the bar."""
        if self.progress.live.is_started:
            self.progress.update(self.task, completed=trainer.global_step, status=self.metrics.status)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Leave the bar on the screen with the latest losses, even after an error."""
        if self.progress.live.is_started:
            self.progress.update(self.task, status=self.metrics.status)
            self.progress.stop()


class TrialPruning(Callback):
    """Stops the run once the sweep has written prune.json; checks before every batch.

    A file written before this process started is stale: the sweep rewrites it if the trial should still be pruned.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / PRUNE_FILE

    def on_fit_start(self, trainer: L.Trainer, module: LitMoE) -> None:
        """Remove a stale prune.json."""
        if is_rank_zero():
            self.file.unlink(missing_ok=True)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop if prune.json exists.

        Raises:
            PrunedError: with the reason in the file.
        """
        if max_over_ranks(is_rank_zero() and self.file.exists()):
            reason = on_rank_zero(lambda: json.loads(self.file.read_bytes())["reason"])
            raise PrunedError(f"{reason}; stopped at step {trainer.global_step}")


class RunCallbacks(NamedTuple):
    """The callbacks of a run in the order in which Lightning calls them."""

    tracker: Tracker
    metrics: MetricsLogger
    progress: ProgressBar
    schedule: ValidationSchedule
    pruning: TrialPruning
    rounding: RoundingWarning
    devices: DeviceChanges
    checkpoints: Checkpoints


def build_callbacks(spec: RunSpec) -> RunCallbacks:
    """Return the callbacks of a run."""
    keys, optim, tracker = spec.config.trainer, spec.config.optim, Tracker(spec)
    tokens_per_step = keys.global_batch * spec.config.data.seq_len
    metrics = MetricsLogger(spec.path, keys, tokens_per_step, tracker)
    checkpoints = Checkpoints(spec.path / "checkpoints", keys.ckpt_every, keys.ckpt_seconds, keys.keep_every)
    return RunCallbacks(
        tracker,
        metrics,
        ProgressBar(metrics, checkpoints, f"{spec.arm} seed={spec.config.seed}", keys.progress_bar),
        ValidationSchedule(keys.val_every, keys.val_at),
        TrialPruning(spec.path),
        RoundingWarning(optim.warmup_steps, keys.max_steps, optim.lr),
        DeviceChanges(),
        checkpoints,
    )

"""The callbacks of a run: metrics.jsonl, progress bar, pruning, and warnings for runs that succeed."""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.distributed.tensor import DTensor

from simbal.config.schema import OptimConfig, TrainerConfig
from simbal.data.loader import TokenData
from simbal.distributed import is_rank_zero, max_over_ranks, on_rank_zero, sum_over_ranks, world_size
from simbal.metrics.definitions import SETTLING, SIMILARITY
from simbal.metrics.routing import max_vio
from simbal.model.expert_similarity import record_similarity
from simbal.model.transformer import Transformer
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

log = logging.getLogger("simbal")
STEPS_AFTER_WARMUP = 100  # steps after warm-up until bf16 weights are compared
MOVED_FRACTION = 0.01  # warn if a smaller fraction of a weight's entries has changed
MAX_ENTRIES = 4096  # compared entries per weight, to keep the copy small
MIN_CLIP_FACTOR = 0.01  # below, AdamW's `eps` matters: see results/bench_grid


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
        self.seconds, self.steps = 0.0, 0  # training time and steps in this process
        self._logged_seconds, self._logged_steps = 0.0, 0  # up to the last row
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

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Ask the module for the gradient of the auxiliary losses in logged steps."""
        assert isinstance(module, LitMoE)
        module.measures_aux_gradient = self.is_logged

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start timing the micro-batch; before the first step, measure PES."""
        assert isinstance(module, LitMoE)
        if trainer.global_step == 0 and batch_idx == 0 and self._measures_pes(module):
            self._write(self._place(0) | measure_pes(trainer, module, self.config.pes_tokens))
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Write a row after an optimizer step that is logged or has a measurement of PES."""
        assert isinstance(module, LitMoE)
        result, row, pes = module.step_result, {}, {}
        if result and self.is_logged(result.number):
            row = self._place(result.number) | training_metrics(result)
            row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.seconds += time.perf_counter() - self._started
        if result is None:
            return
        self.steps += 1
        if row:
            steps, seconds = self.steps - self._logged_steps, self.seconds - self._logged_seconds
            self._logged_steps, self._logged_seconds = self.steps, self.seconds
            row["tokens_per_second"] = steps * self.tokens_per_step / seconds
        if self._measures_pes(module) and result.number % self.config.pes_every == 0:
            pes = measure_pes(trainer, module, self.config.pes_tokens)
        if row or pes:
            self._write(self._place(result.number) | row | pes)
        if row:
            self._write_progress(row)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write a row for a validation during training."""
        if trainer.state.fn == "fit":
            self.log_validation(module, trainer.global_step)

    def log_validation(self, module: L.LightningModule, step: int) -> None:
        """Write a row for the module's latest validation, which followed `step`."""
        assert isinstance(module, LitMoE)
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

    def _write_progress(self, row: dict[str, Any]) -> None:
        self._status["train"] = f"loss {row.get('train/ce', math.nan):.3f}  {row['tokens_per_second']:,.0f} tokens/s"
        progress = {
            "phase": "training",
            "step": row["step"],
            "max_steps": self.config.max_steps,
            "loss": row.get("train/ce"),
            "tokens_per_second": row["tokens_per_second"],
            "seconds_left": (self.config.max_steps - row["step"]) * self.seconds / self.steps,
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

    def __init__(self, metrics: MetricsLogger, description: str, enabled: bool) -> None:
        self.metrics, self.enabled = metrics, enabled
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

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Remove a stale prune.json."""
        if is_rank_zero():
            self.file.unlink(missing_ok=True)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop if prune.json exists.

        Raises:
            PrunedError: with the reason in the file.
        """
        if max_over_ranks(is_rank_zero() and self.file.exists()):
            reason = on_rank_zero(self._take_reason)
            raise PrunedError(f"{reason}; stopped at step {trainer.global_step}")

    def _take_reason(self) -> str:
        reason = str(json.loads(self.file.read_bytes())["reason"])
        self.file.unlink()
        return reason


class DeviceChanges(Callback):
    """Lets a run resume with a different number of devices or precision, and warns that rounding has changed."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, Any]] = {"devices": {}, "precision": {}}  # values by first step

    @property
    def warnings(self) -> list[str]:
        """A warning for the devices and for the precision, if they changed."""
        warnings = []
        for what, values in self.history.items():
            spans = ", ".join(f"{value} from step {step}" for step, value in values.items())
            if len(values) > 1:
                warnings.append(f"{what} changed, which affects rounding: {spans}")
        return warnings

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
        self.history = {what: {**values} for what, values in state_dict.items()}

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

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the entries to compare with."""
        assert isinstance(module, LitMoE)
        self._first_step = trainer.global_step
        self._start = {name: entries.clone() for name, entries in bf16_entries(module.model).items()}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Compare the weights once; a run that resumed after `step` compares them at its last step."""
        assert isinstance(module, LitMoE)
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
            examples = ", ".join(unchanged[:3]) + (", ..." if len(unchanged) > 3 else "")
            self.warnings = [
                f"{len(unchanged)} of {len(self._start)} weights did not change in {due - self._first_step} steps "
                f"({examples}): updates of optim.lr={self.lr:g} round to zero in bf16; use trainer.precision=bf16-mixed"
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


def warn_overclipping(clip_factors: Sequence[float], optim: OptimConfig) -> Iterator[str]:
    """Yield a warning if clipping made gradients so small that AdamW's `eps` matters.

    An auxiliary loss with a large gradient causes this, and changes the updates of unrelated weights.

    Args:
        clip_factors: the factors by which clipping scaled the gradients of the logged steps.
        optim: the settings of the optimizer.
    """
    if clip_factors and median(clip_factors) < MIN_CLIP_FACTOR:
        yield (
            f"optim.grad_clip={optim.grad_clip:g} divided the gradients by {1 / median(clip_factors):,.0f} (median), "
            f"probably because an auxiliary loss has a large gradient; optim.eps={optim.eps:g} is no longer small "
            "compared with the other gradients: set optim.grad_clip=0"
        )


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
    return RunCallbacks(
        tracker,
        metrics,
        ProgressBar(metrics, f"{spec.choices['balancing']} seed={spec.config.seed}", keys.progress_bar),
        ValidationSchedule(keys.val_every, keys.val_at),
        TrialPruning(spec.path),
        RoundingWarning(optim.warmup_steps, keys.max_steps, optim.lr),
        DeviceChanges(),
        Checkpoints(spec.path / "checkpoints", keys.ckpt_every, keys.ckpt_seconds, keys.keep_every),
    )

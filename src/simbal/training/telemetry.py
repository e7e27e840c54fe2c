"""The curves of a run: metrics.jsonl, TensorBoard and progress.json.

Values stay on the device between logged steps, so that watching a run does not slow it down.
"""

import json
import time
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from simbal.metrics.load import max_vio
from simbal.run_folder import write_json, write_text
from simbal.training.lit_moe import LitMoE
from simbal.training.pes import PES


class Telemetry(Callback):
    """A row at every `log_every`-th step and the last, with means over its micro-batches; one for each validation."""

    def __init__(self, folder: Path, log_every: int, max_steps: int, tokens_per_step: int, pes: PES) -> None:
        self.pes = pes
        self.folder, self.file = folder, folder / "metrics.jsonl"
        self.log_every, self.max_steps, self.tokens_per_step = log_every, max_steps, tokens_per_step
        self.seconds, self.steps = 0.0, 0  # spent in training steps by this process
        self._shown: dict[str, str] = {}
        self._losses: list[dict[str, Any]] = []  # of the micro-batches of the step in progress
        self._logged_steps, self._logged_seconds = 0, 0.0

    @property
    def tokens_per_second(self) -> float:
        """Harmonic mean over the rows of metrics.jsonl, those of earlier processes included."""
        speeds = [row["tokens_per_second"] for row in self._rows() if "tokens_per_second" in row]
        return float(harmonic_mean(speeds))

    @property
    def shown(self) -> str:
        """The newest losses and speed, for a progress bar."""
        return "  ".join(self._shown.values())

    def rewind(self, step: int) -> None:
        """Drop what a killed run wrote after the checkpoint of `step`, a torn last line included."""
        if self.file.exists():
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("}\n")]
            write_text(self.file, "".join(line for line in whole if json.loads(line)["step"] <= step))

    def validated(self, step: int) -> bool:
        """Whether metrics.jsonl has a validation row of `step`."""
        return any(row["step"] == step and "val/loss" in row for row in self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Start the clock of this micro-batch; before the first step, the PES of the start."""
        assert isinstance(module, LitMoE)
        first = trainer.global_step == 0 and not self._losses
        # a process that was killed before its first checkpoint has left the row of step 0
        if first and self.pes.due(0, module) and not any("pes/min" in row for row in self._rows()):
            self._write(trainer, self._place(0) | self.pes.measure(trainer, module))
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Write a row when a logged step is complete."""
        assert isinstance(module, LitMoE)
        self._losses.append({key: outputs[key] for key in ("total", "ce", "aux")})
        step = trainer.global_step
        row, complete = None, len(self._losses) == trainer.accumulate_grad_batches
        if complete:
            if step % self.log_every == 0 or step == self.max_steps:
                row = self._row(trainer, module, step)
            self._losses.clear()
            self.steps += 1
        self.seconds += time.perf_counter() - self._started
        pes = self.pes.measure(trainer, module) if complete and self.pes.due(step, module) else {}
        if row:
            self._log(trainer, row | pes)
        elif pes:
            self._write(trainer, self._place(step) | pes)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the row of a validation between two steps."""
        if trainer.state.fn == "fit":
            self.log_validation(trainer, module, trainer.global_step)

    def log_validation(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Write the row of the validation just made, all layers included."""
        assert isinstance(module, LitMoE)
        assert module.validation is not None
        metrics = {key: value for key, value in module.validation.metrics.items() if value is not None}
        self._write(trainer, self._place(step) | metrics | {"layers": module.validation.layers})
        self._shown["val"] = f"val {metrics['val/loss']:.3f}"

    def _place(self, step: int) -> dict[str, Any]:
        return {"step": step, "tokens": step * self.tokens_per_step}

    def _row(self, trainer: L.Trainer, module: LitMoE, step: int) -> dict[str, Any]:
        n, row = len(self._losses), self._place(step)
        row["train/loss"] = sum(loss["total"].item() for loss in self._losses) / n
        row["train/ce"] = sum(loss["ce"].item() for loss in self._losses) / n
        for name in self._losses[0]["aux"]:
            row[f"train/aux/{name}"] = sum(loss["aux"][name].item() for loss in self._losses) / n
        row["train/grad_norm"] = module.grad_norm.item()
        if module.model.routers:
            row["train/load/max_vio"] = max_vio(module.finished_counts_LE).mean().item()
        row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        return row

    def _log(self, trainer: L.Trainer, row: dict[str, Any]) -> None:
        steps, seconds = self.steps - self._logged_steps, self.seconds - self._logged_seconds
        self._logged_steps, self._logged_seconds = self.steps, self.seconds
        row["tokens_per_second"] = steps * self.tokens_per_step / seconds
        self._write(trainer, row)
        self._shown["train"] = f"loss {row['train/ce']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
        remaining = (self.max_steps - row["step"]) * self.seconds / self.steps
        progress = {
            "phase": "training", "step": row["step"], "max_steps": self.max_steps, "loss": row["train/ce"],
            "tokens_per_second": row["tokens_per_second"], "seconds_left": remaining,
        }  # fmt: skip
        write_json(self.folder / "progress.json", progress)

    def _write(self, trainer: L.Trainer, row: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if trainer.logger:
            scalars = {key: value for key, value in row.items() if isinstance(value, float)}
            trainer.logger.log_metrics(scalars, row["step"])

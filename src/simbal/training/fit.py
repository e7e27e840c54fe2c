"""The training of one run: from its newest checkpoint, or its start, to its last step."""

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from simbal.data.loader import TokenData
from simbal.distributed import from_first, is_first
from simbal.runs.spec import RunSpec
from simbal.training import checkpoint, loggers
from simbal.training.checkpoint import Saving
from simbal.training.lit_moe import LitMoE
from simbal.training.parallel import on_devices
from simbal.training.stop import TrialPruning
from simbal.training.telemetry import PES, ProgressBar, Telemetry

log = logging.getLogger("simbal")
EXPECTED_WARNINGS = (
    ".*does not have many workers",  # our loader is a memory map
    ".*exists and is not empty",  # the checkpoints of the run that is continued
    ".*isinstance.treespec, LeafSpec",  # Lightning 2.6 under torch 2.13
    ".*returned a view tensor",  # of fsdp: no layer's output is changed in place
    ".*broadcast_buffers. is deprecated",  # its successor is not in torch 2.11
)


def fit(
    spec: RunSpec, folder: Path, module: LitMoE, data: TokenData, accelerator: str, precision: str
) -> dict[str, Any]:
    """Train to the last step, on every rank alike; validate at the start, after each `val_every`-th step and the last.

    Returns:
        The entries of the record that are measured: `seconds`, `tokens_per_second`, `metrics`, `layers`, `curves` and
        `skipped_steps`.

    Raises:
        DivergedError, PrunedError, StoppedError: training ended before.
        UserError: a checkpoint belongs to another config.
    """
    keys = spec.config.trainer
    tokens_per_step = keys.global_batch * spec.config.data.seq_len
    pes = PES(keys.pes_every, keys.pes_tokens)
    telemetry = Telemetry(folder, keys.log_every, keys.max_steps, tokens_per_step, pes)
    module.observers.append(telemetry)
    trainer = build_trainer(spec, folder, telemetry, accelerator, precision)
    started = time.perf_counter()

    def validate(step: int, path: Path | None = None) -> None:
        trainer.validate(module, data, ckpt_path=path, weights_only=True, verbose=False)
        if not telemetry.validated(step):
            telemetry.log_validation(trainer, step)

    start = from_first(lambda: checkpoint.newest(folder / "checkpoints", spec.hash, telemetry.trouble))
    telemetry.rewind(start.curves)
    loggers.attach(trainer, spec, folder, start.step, telemetry.rows)
    if start.step % keys.val_every == 0 and not telemetry.validated(start.step):
        validate(start.step, start.path)  # of the start, or missed by a kill between a checkpoint and its validation
    log.info("training from step %d to %d", start.step, keys.max_steps)
    trainer.fit(module, data, ckpt_path=start.path, weights_only=True)
    if telemetry.validation is None or not telemetry.validated(keys.max_steps):
        validate(keys.max_steps)
    trainer.save_checkpoint(folder / "checkpoints" / "final.ckpt", weights_only=True)
    measured = final_metrics(telemetry, trainer, module)
    loggers.finish(trainer, spec, measured["metrics"])
    speed = {"seconds": time.perf_counter() - started, "tokens_per_second": telemetry.tokens_per_second}
    return speed | measured | {"curves": telemetry.state_dict(), "skipped_steps": module.skipped_steps}


def final_metrics(telemetry: Telemetry, trainer: L.Trainer, module: LitMoE) -> dict[str, Any]:
    """Return `metrics` and, by layer, `layers` of the last validation, with the experts' PES if that is measured."""
    assert telemetry.validation is not None
    metrics, layers = telemetry.validation.metrics, telemetry.validation.layers
    if not telemetry.pes.measures(module):
        return {"metrics": metrics, "layers": layers}
    similarity = telemetry.pes.measure(trainer, module)
    return {"layers": layers | similarity.pop("layers"), "metrics": metrics | similarity}


def build_trainer(spec: RunSpec, folder: Path, telemetry: Telemetry, accelerator: str, precision: str) -> L.Trainer:
    """Return Lightning's Trainer, with nothing of its own on the screen or on the disk."""
    keys = spec.config.trainer
    accumulate = keys.global_batch // (keys.micro_batch * keys.devices)
    saving = Saving(folder / "checkpoints", keys.ckpt_every, keys.ckpt_seconds, keys.keep_every)
    callbacks: list[Callback] = [telemetry, saving, TrialPruning(folder)]
    if keys.progress_bar and is_first():
        callbacks.append(ProgressBar(telemetry, f"{spec.choices['balancing']} seed={spec.config.seed}"))
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    return L.Trainer(
        accelerator=accelerator,
        **on_devices(keys.devices, keys.strategy),
        precision=precision,  # type: ignore[arg-type]
        max_steps=keys.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=keys.val_every * accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # of `self.log`, which nothing here uses
        use_distributed_sampler=False,
        logger=False,  # `loggers.attach` gives it one
        callbacks=callbacks,
        plugins=[checkpoint.AtomicCheckpointIO(spec.hash)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )

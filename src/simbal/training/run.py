"""Trains one run from its spec to its record: prepares the data, builds, trains, records and logs.

Everything a user can get wrong is found before the run folder is made.
"""

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from simbal.data.loader import TokenData
from simbal.data.prepare import prepare
from simbal.data.store import Store
from simbal.distributed import is_rank_zero, on_rank_zero
from simbal.processes import keep_freed_memory
from simbal.runs.atomic import explain_write_errors, remove_partial_files, write_json
from simbal.runs.folder import DOCUMENTS_FILE, RunFolder
from simbal.runs.record import digest, now
from simbal.runs.spec import RunSpec
from simbal.training import checkpoint, failures, record
from simbal.training.build import (
    build_data,
    build_module,
    build_strategies,
    resolve_device,
    resolve_precision,
    transformer_shape,
)
from simbal.training.callbacks import DeviceChanges, RoundingWarning, TrialPruning, warn_overclipping
from simbal.training.checkpoint import Checkpoints
from simbal.training.module import LitMoE
from simbal.training.strategies import (
    cluster_environment,
    devices_per_node,
    join_ranks,
    started_by_launcher,
    trainer_arguments,
)
from simbal.training.telemetry import PES, ProgressBar, Telemetry
from simbal.training.trackers import Tracker
from simbal.training.validation import ValidationTimes, is_validated
from simbal.training.worker import run_worker

log = logging.getLogger("simbal")
EXPECTED_WARNINGS = (
    ".*does not have many workers",  # our loader is a memory map
    ".*exists and is not empty",  # the checkpoints of the run that is continued
    ".*isinstance.treespec, LeafSpec",  # Lightning 2.6 under torch 2.13
    ".*returned a view tensor",  # of fsdp: no layer's output is changed in place
    ".*broadcast_buffers. is deprecated",  # its successor is not in torch 2.11
    ".*srun. command is available",  # wherever Slurm is installed
)


def train(spec: RunSpec) -> None:
    """Train the run, resume it, or say that it is finished.

    Raises:
        UserError: the run cannot be done here, or has diverged.
        StoppedError: a signal has stopped it; it is saved.
        SystemExit: the worker of a run on several devices has failed, and printed why.
    """
    folder, keys = RunFolder(spec.path), spec.config.trainer
    shape = transformer_shape(spec, end_of_text=0)  # errors in it are reported before data are prepared
    if not folder.is_finished(spec):  # else a strategy may be gone by now
        build_strategies(spec, shape)
    resolve_device(keys.accelerator, devices_per_node(keys.devices))
    is_rank = started_by_launcher(keys.devices)
    store = prepare(spec.config.data, progress=keys.progress_bar)
    if folder.is_finished(spec):
        record_before = folder.read_record() or {}
        folder.require_same_data(record_before["data"]["tokens"], store.fingerprints["tokens"])
        print(f"finished before: {folder.path}")
    elif keys.devices == 1 or is_rank:
        train_rank(spec, store)
    else:
        run_worker(spec)


def train_rank(spec: RunSpec, store: Store) -> None:
    """Train as one of the run's processes; rank zero holds the folder, writes and prints."""
    keep_freed_memory()
    folder, keys = RunFolder(spec.path), spec.config.trainer
    device = resolve_device(keys.accelerator, devices_per_node(keys.devices))
    precision = resolve_precision(keys.precision, device, keys.force_precision)
    callbacks = RunCallbacks.of(spec)
    trainer = build_trainer(spec, callbacks.all(spec), device.type, precision)
    join_ranks(trainer.strategy)
    if keys.progress_bar and is_rank_zero():
        bar = ProgressBar(callbacks.telemetry, f"{spec.choices['balancing']} seed={spec.config.seed}")
        trainer.callbacks.insert(0, bar)  # type: ignore[attr-defined]
    module, data = build_module(spec, store, device, precision), build_data(spec, store)
    run: dict[str, Any] = {}
    notices: list[str] = []
    with ExitStack() as held:
        if not on_rank_zero(partial(acquire_folder, folder, spec, held)):
            return
        if is_rank_zero():
            held.enter_context(explain_write_errors(folder.path))
            held.enter_context(log_to(folder.path / "train.log"))
            run = record.describe(spec, data, module, device, precision)
            print_header(spec, run)
            notices += filter(None, (folder.set_aside_damaged_record(),))
        with failures.recorded(folder, run):
            measured = fit(spec, trainer, callbacks, module, data)
            if is_rank_zero():
                finish(folder, run | measured, notices)
                held.callback(print_result, folder.path, measured)  # later, as this block takes any error for the run's


def print_header(spec: RunSpec, run: dict[str, Any]) -> None:
    """Print and log the strategies and the backend, and a note if the run is shorter than its warm-up."""
    lines, warmup_steps, max_steps = record.lines(run), spec.config.optim.warmup_steps, spec.config.trainer.max_steps
    if warmup_steps >= max_steps:
        ends = f"trainer.max_steps={max_steps} ends within optim.warmup_steps={warmup_steps}"
        lines.append(f"note: {ends}: the learning rate never reaches its peak")
    for line in lines:
        print(line)
        log.info(line)


def finish(folder: RunFolder, run: dict[str, Any], notices: list[str]) -> None:
    """Write the record of a run that has reached its last step."""
    notices = [*notices, *run["warnings"], *checkpoint.warnings(folder.path / "checkpoints")]
    folder.write_record(run | {"status": "finished", "ended": now(), "warnings": notices})


def print_result(folder: Path, measured: dict[str, Any]) -> None:
    """Remove the checkpoints of a finished run, and print its warnings and its result."""
    checkpoint.remove_periodic(folder / "checkpoints")
    for warning in measured["warnings"]:
        print(f"warning: {warning}")
    print(f"val/ppl {measured['metrics']['val/ppl']:.3f}  {folder}")


def acquire_folder(folder: RunFolder, spec: RunSpec, held: ExitStack) -> bool:
    """Take the folder for as long as `held` lasts.

    Returns:
        False if another process has finished the run meanwhile.

    Raises:
        UserError: another process or another run has the folder.
    """
    held.enter_context(folder.lock())
    if folder.is_finished(spec):
        print(f"finished by another process: {folder.path}")
        return False
    folder.write_spec(spec)
    with explain_write_errors(folder.path):
        for written in (folder.path, folder.path / "checkpoints"):
            remove_partial_files(written)
    return True


@dataclass(frozen=True)
class RunCallbacks:
    """The callbacks of a run that `fit` asks for their findings."""

    telemetry: Telemetry
    rounding: RoundingWarning
    changes: DeviceChanges
    checkpoints: Checkpoints

    @classmethod
    def of(cls, spec: RunSpec) -> "RunCallbacks":
        """Return the callbacks of a run."""
        keys, optim = spec.config.trainer, spec.config.optim
        tokens_per_step = keys.global_batch * spec.config.data.seq_len
        pes = PES(keys.pes_every, keys.pes_tokens)
        return cls(
            Telemetry(spec.path, keys.log_every, keys.max_steps, tokens_per_step, pes),
            RoundingWarning(optim.warmup_steps, keys.max_steps, optim.lr),
            DeviceChanges(),
            Checkpoints(spec.path / "checkpoints", keys.ckpt_every, keys.ckpt_seconds, keys.keep_every),
        )

    def all(self, spec: RunSpec) -> list[Callback]:
        """Return all callbacks of the run in the order in which Lightning calls them."""
        keys = spec.config.trainer
        times = ValidationTimes(keys.val_every, keys.val_at)
        return [self.telemetry, times, TrialPruning(spec.path), self.rounding, self.changes, self.checkpoints]


def fit(spec: RunSpec, trainer: L.Trainer, callbacks: RunCallbacks, module: LitMoE, data: TokenData) -> dict[str, Any]:
    """Train to the last step, on every rank alike; validate on the way, and finally on the whole validation split.

    Returns:
        The entries of the record that are measured: `seconds`, `tokens_per_second`, `metrics`, `layers`, `curves`,
        `documents`, `skipped_steps` and `warnings`.

    Raises:
        DivergedError, PrunedError, StoppedError: training ended before.
        UserError: a checkpoint belongs to another config.
    """
    folder, keys, telemetry = spec.path, spec.config.trainer, callbacks.telemetry
    module.observers.append(telemetry)
    started = time.perf_counter()

    def validate(step: int, path: Path | None = None) -> None:
        trainer.validate(module, data, ckpt_path=path, weights_only=True, verbose=False)
        if not telemetry.validated(step):
            telemetry.log_validation(trainer, step)

    start = on_rank_zero(lambda: checkpoint.newest(folder / "checkpoints", spec.hash, telemetry.trouble))
    callbacks.checkpoints.start = start.step
    telemetry.rewind(start.curves)
    tracker = open_tracker(spec, trainer, callbacks, start.step)
    if is_validated(start.step, keys.val_every, keys.val_at) and not telemetry.validated(start.step):
        validate(start.step, start.path)  # of the start, or missed by a kill between a checkpoint and its validation
    log.info("training from step %d to %d", start.step, keys.max_steps)
    if start.step and is_rank_zero():
        print(f"resuming from step {start.step} of {keys.max_steps}")
    trainer.fit(module, data, ckpt_path=start.path, weights_only=True)
    if not telemetry.validated(keys.max_steps):
        validate(keys.max_steps)
    trainer.save_checkpoint(folder / "checkpoints" / "final.ckpt", weights_only=True)
    trainer.validate(module, data.validation_batches(None), verbose=False)
    measured = final_metrics(telemetry, trainer, module) | {"documents": write_documents(folder, telemetry)}
    warnings = [
        *callbacks.rounding.warnings, *callbacks.changes.warnings,
        *warn_overclipping(telemetry.clipped(), spec.config.optim),
    ]  # fmt: skip
    if tracker:
        tracker.finish(measured["metrics"])
        warnings += filter(None, [tracker.warning])
    speed = {"seconds": time.perf_counter() - started, "tokens_per_second": telemetry.tokens_per_second}
    return speed | measured | {
        "curves": telemetry.state_dict(), "skipped_steps": module.skipped_steps, "warnings": warnings,
    }  # fmt: skip


def open_tracker(spec: RunSpec, trainer: L.Trainer, callbacks: RunCallbacks, step: int) -> Tracker | None:
    """Return the tracker that the config names, which gets the rows from now on; None without one, or on other ranks.

    It is opened once the checkpoint is known from which the run resumes.
    """
    if spec.config.logger.kind == "none" or not is_rank_zero():
        return None
    tracker = Tracker(spec, step)
    callbacks.telemetry.tracker = tracker
    trainer.callbacks.insert(0, tracker)  # type: ignore[attr-defined]
    return tracker


def final_metrics(telemetry: Telemetry, trainer: L.Trainer, module: LitMoE) -> dict[str, Any]:
    """Return `metrics` and, by layer, `layers` of the last validation, with the experts' PES if that is measured.

    Of a model with routers there are the numbers of how their load has settled, too, if enough steps are logged.
    """
    assert telemetry.validation is not None
    metrics, layers = telemetry.validation.metrics | telemetry.settling(), telemetry.validation.layers
    if not telemetry.pes.measures(module):
        return {"metrics": metrics, "layers": layers}
    similarity = telemetry.pes.measure(trainer, module)
    return {"layers": layers | similarity.pop("layers"), "metrics": metrics | similarity}


def write_documents(folder: Path, telemetry: Telemetry) -> dict[str, Any] | None:
    """Write documents.json, the sums of the last validation by document, and return its size and sha256."""
    if not is_rank_zero():
        return None
    assert telemetry.validation is not None
    nats, tokens, num_bytes = telemetry.validation.documents_G3.T.tolist()
    sums = {"nats": nats, "tokens": [*map(int, tokens)], "bytes": [*map(int, num_bytes)]}
    write_json(folder / DOCUMENTS_FILE, sums)
    return digest((folder / DOCUMENTS_FILE).read_bytes())


def build_trainer(spec: RunSpec, callbacks: list[Callback], accelerator: str, precision: str) -> L.Trainer:
    """Return a Trainer with Lightning's progress bar, loggers and default checkpoints disabled."""
    keys = spec.config.trainer
    accumulate = keys.global_batch // (keys.micro_batch * keys.devices)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    return L.Trainer(
        accelerator=accelerator,
        **trainer_arguments(keys.devices, keys.strategy, spec.hash),
        precision=precision,  # type: ignore[arg-type]
        max_steps=keys.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=keys.val_every * accumulate,  # `ValidationTimes` decides when
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # of `self.log`, which costs 0.37 ms per metric and step and is not used
        use_distributed_sampler=False,
        logger=False,  # `Tracker` sends the rows
        callbacks=callbacks,
        plugins=[checkpoint.AtomicCheckpointIO(spec.hash), cluster_environment()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=spec.path,
    )


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append to `file` what this package logs within the block, and the errors that end threads of other packages."""
    handler = _RunLog(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.disabled = False  # Hydra disables every logger that is there when it starts a job, as in a forked process
    before, threading.excepthook = threading.excepthook, _log_end_of_thread
    try:
        yield
    finally:
        threading.excepthook = before
        log.removeHandler(handler)
        handler.close()


class _RunLog(logging.FileHandler):
    """A log file that loses lines where the disk is full; Python would print a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None:
        log.error("a thread has ended", exc_info=(end.exc_type, end.exc_value, end.exc_traceback))

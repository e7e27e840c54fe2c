"""Trains one run from its spec to its record: prepares the data, builds, trains, records and logs.

Everything a user can get wrong is found before the run folder is made.
"""

import errno
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simbal.data.store import Store, prepare
from simbal.distributed import from_first, is_first
from simbal.errors import UserError, redacted
from simbal.files.disk import refusals_of_disk, remedy, remove_parts
from simbal.files.locks import LEASE_SECONDS
from simbal.processes.heap import keep_freed_memory
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training import checkpoint, ending, record
from simbal.training.build import build_data, build_module, resolve_device, resolve_precision, transformer_shape
from simbal.training.fit import fit
from simbal.training.free_memory import memory_warning, require_room
from simbal.training.lit_moe import LitMoE
from simbal.training.ranks import Ranks, local_devices, together

log = logging.getLogger("simbal")


def train(spec: RunSpec) -> None:
    """Do the run, continue it, or, if it is finished, say so.

    Raises:
        UserError: the run cannot be done here, or has diverged.
        StoppedError: a signal has asked for it.
    """
    folder, keys = RunFolder(spec.path), spec.config.trainer
    require_room(transformer_shape(spec, end_of_text=0))  # before data are prepared with a byte for each id
    store = prepare(spec.config.data, progress=keys.progress_bar)
    if folder.finished(spec):
        folder.require_data(store.fingerprints["tokens"])
        print(f"finished before: {folder.path}")
        return
    device = resolve_device(keys.accelerator, local_devices(keys.devices))
    together(train_rank, (spec, store, device), keys.devices)


def train_rank(ranks: Ranks, spec: RunSpec, store: Store, device: torch.device) -> None:
    """Do the work of one of the run's processes; the first holds the folder, writes and prints."""
    keep_freed_memory()
    folder, keys = RunFolder(spec.path), spec.config.trainer
    precision = resolve_precision(keys.precision, device, keys.force_precision)
    module, data = build_module(spec, store, device, precision), build_data(spec, store)
    run: dict[str, Any] = {}
    warnings: list[str] = []
    with ExitStack() as held:
        if not from_first(partial(claim, folder, spec, module, held)):
            return
        if is_first():
            held.enter_context(refusals_of_disk(folder.path))
            held.enter_context(log_to(folder.path / "train.log"))
            run = record.describe(spec, data, module, device, precision)
            tight = memory_warning(spec, module.model.shape, module.model.backend, device, precision)
            announce(spec, run, tight)
            warnings = [*filter(None, (tight, folder.set_aside_damaged_record()))]
        with ending.recorded(folder, run, keys, ranks):
            measured = fit(spec, folder.path, module, data, device.type, precision)
            if is_first():
                finish(folder, run | measured, warnings)


def announce(spec: RunSpec, run: dict[str, Any], tight: str | None) -> None:
    """Print and log what is about to be trained, with a warning if memory is `tight`.

    A run that is too short for its warm-up gets a note: in a trial run that is no mistake, in a long one it may be.
    """
    lines, warmup_steps, max_steps = record.lines(run), spec.config.optim.warmup_steps, spec.config.trainer.max_steps
    if warmup_steps >= max_steps:
        ends = f"trainer.max_steps={max_steps} ends within optim.warmup_steps={warmup_steps}"
        lines.append(f"note: {ends}: the rate only rises")
    if tight:
        lines.append(f"warning: {tight}")
    for line in lines:
        print(line)
        log.info(line)


def finish(folder: RunFolder, run: dict[str, Any], warnings: list[str]) -> None:
    """Write the record of a run that has reached its last step, and remove the checkpoints that it needs no more."""
    checkpoints = folder.path / "checkpoints"
    warnings = [*warnings, *checkpoint.warnings(checkpoints)]
    folder.write_record(run | {"status": "finished", "ended": record.now(), "warnings": warnings})
    checkpoint.remove_periodic(checkpoints)
    print(f"val/ppl {run['metrics']['val/ppl']:.3f}  {folder.path}")


def claim(folder: RunFolder, spec: RunSpec, module: LitMoE, held: ExitStack) -> bool:
    """Take the folder for as long as `held` lasts; return False if another process has finished the run meanwhile.

    Raises:
        UserError: the disk is too full, or another process or run has the folder.
    """
    require_space(folder.path, module)
    held.enter_context(folder.lock(timeout=2 * LEASE_SECONDS))
    if folder.finished(spec):
        print(f"finished by another process: {folder.path}")
        return False
    folder.write_spec(spec)
    with refusals_of_disk(folder.path):
        for written in (folder.path, folder.path / "checkpoints"):
            remove_parts(written)
    return True


def require_space(folder: Path, module: LitMoE) -> None:
    """Raise `UserError` where three checkpoints (weights and two moments, fp32) do not fit.

    Two stay beside a new one.
    """
    needed = 3 * 3 * 4 * sum(parameter.numel() for parameter in module.parameters())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    disk = shutil.disk_usage(existing.resolve())
    if disk.total and disk.free < needed:  # one of no size, as /proc, says nothing of space
        raise UserError(
            f"cannot write {folder}: the run needs {needed / 1e6:.0f} MB for its checkpoints, and "
            f"{disk.free / 1e6:.0f} MB are free; {remedy(OSError(errno.ENOSPC, ''), 'output_dir')}"
        )


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append to `file` what this package logs within the block, and the errors that end threads of other packages."""
    handler = _RunLog(file)
    handler.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
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


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None:
        log.error("a thread has ended", exc_info=(end.exc_type, end.exc_value, end.exc_traceback))

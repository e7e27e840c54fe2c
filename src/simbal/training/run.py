"""One run from its spec to its record: prepare the data, build, train, record.

Everything a user can get wrong is found before the run folder is made.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simbal.atomic_file import remove_parts
from simbal.data.store import Store, prepare
from simbal.disk import refusals_of_disk
from simbal.errors import UserError
from simbal.heap import keep_freed_memory
from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec
from simbal.training import checkpoint, ending, record
from simbal.training.build import build_data, build_module, resolve_device, resolve_precision
from simbal.training.fit import fit
from simbal.training.free_memory import memory_warning
from simbal.training.lit_moe import LitMoE
from simbal.training.processes import local_devices, together
from simbal.training.ranks import from_first, is_first
from simbal.training.run_log import log_to

log = logging.getLogger("simbal")
Fitting = Callable[[], dict[str, Any]]  # trains, and returns what was measured


def train(spec: RunSpec) -> None:
    """Do the run, continue it, or, if it is finished, say so.

    Raises:
        UserError: the run cannot be done here, or has diverged.
        StoppedError: a signal has asked for it.
    """
    folder, keys = RunFolder(spec.path), spec.config["trainer"]
    store = prepare(spec.config["data"], progress=keys["progress_bar"])
    if folder.finished(spec):
        folder.require_data(store.fingerprints["tokens"])
        print(f"finished before: {folder.path}")
        return
    device = resolve_device(keys["accelerator"], local_devices(keys["devices"]))
    together(train_rank, (spec, store, device), keys["devices"])


def train_rank(spec: RunSpec, store: Store, device: torch.device) -> None:
    """What each of the run's processes does; the first holds the folder, writes and prints."""
    keep_freed_memory()
    folder, keys = RunFolder(spec.path), spec.config["trainer"]
    precision = resolve_precision(keys["precision"], device, keys["force_precision"])
    module, data = build_module(spec, store, device, precision), build_data(spec, store)
    with ExitStack() as held:
        if not from_first(partial(claim, folder, spec, module, held)):
            return
        fitting = partial(fit, spec, folder.path, module, data, device.type, precision)
        if is_first():
            with refusals_of_disk(folder.path), log_to(folder.path / "train.log"):
                run = record.describe(spec, data, module, device, precision)
                tight = memory_warning(spec, module.model.shape, module.model.backend, device, precision)
                announce(spec, run, tight)
                train_and_record(folder, run, keys, tight, fitting)
        else:
            with ending.recorded(folder, {}, keys):
                fitting()


def announce(spec: RunSpec, run: dict[str, Any], tight: str | None) -> None:
    """Print and log what is about to be trained, and what to think of it."""
    notes = [*warm_up_note(spec), *([f"warning: {tight}"] if tight else [])]
    for line in [*record.lines(run["objective"]), *record.backend_lines(run), *notes]:
        print(line)
        log.info(line)


def train_and_record(
    folder: RunFolder, run: dict[str, Any], trainer: dict[str, Any], tight: str | None, fitting: Fitting
) -> None:
    """Write down how it ended; if well, without the checkpoints that are needed no more."""
    damaged, checkpoints = folder.set_aside_damaged_record(), folder.path / "checkpoints"
    with ending.recorded(folder, run, trainer):
        measured = fitting()
        warnings = [*filter(None, (tight, damaged)), *checkpoint.warnings(checkpoints)]
        folder.write_record(run | {"status": "finished", "ended": record.now(), "warnings": warnings} | measured)
        checkpoint.remove_periodic(checkpoints)
        print(f"val/ppl {measured['metrics']['val/ppl']:.3f}  {folder.path}")


def claim(folder: RunFolder, spec: RunSpec, module: LitMoE, held: ExitStack) -> bool:
    """Take the folder for as long as `held` lasts; False if another process has finished the run meanwhile.

    Raises:
        UserError: the disk is too full, or another process or run has the folder.
    """
    require_space(folder.path, module)
    held.enter_context(folder.lock())
    if folder.finished(spec):
        print(f"finished by another process: {folder.path}")
        return False
    folder.write_spec(spec)
    with refusals_of_disk(folder.path):
        for written in (folder.path, folder.path / "checkpoints"):
            remove_parts(written)
    return True


def warm_up_note(spec: RunSpec) -> list[str]:
    """A sentence if the run is too short for its warm-up: no mistake in a trial run, in a long one it may be."""
    warmup_steps, max_steps = spec.config["optim"]["warmup_steps"], spec.config["trainer"]["max_steps"]
    if warmup_steps < max_steps:
        return []
    return [f"note: trainer.max_steps={max_steps} ends within optim.warmup_steps={warmup_steps}: the rate only rises"]


def require_space(folder: Path, module: LitMoE) -> None:
    """Refuse to start where three checkpoints (weights and two moments, fp32) do not fit: two stay beside a new one."""
    needed = 3 * 3 * 4 * sum(parameter.numel() for parameter in module.parameters())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing.resolve()).free
    if free < needed:
        raise UserError(
            f"no space left on the disk of {existing}: the run needs {needed / 1e6:.0f} MB for its checkpoints and "
            f"{free / 1e6:.0f} MB are free; free some space, or set output_dir"
        )

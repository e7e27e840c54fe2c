"""Checkpoints: written completely or not at all, verified when they are read, and the newest valid one to resume from.

`step-<N>.ckpt` is a file, with the CRC of the zip format for each tensor; of an FSDP run it is a folder of Lightning's
distributed checkpoint, with SHA256SUMS. Its index is a pickle: such a folder is only read to resume one's own run.
`weights-<N>.ckpt` and `final.ckpt` hold weights and are always one file.

Lightning's `ModelCheckpoint` is not used: it saves before the validation of a step, which a resumed run then skips, it
forgets to remove what it saved just before a kill, and its writer is not atomic across file systems.
"""

import errno
import hashlib
import logging
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import Checkpoint

from simbal.distributed import is_rank_zero, max_over_ranks, on_rank_zero
from simbal.errors import UserError
from simbal.runs.atomic import PARTIAL_SUFFIX, atomic_write, sync_to_disk
from simbal.training.signals import StoppedError, StopRequest

log = logging.getLogger("simbal")
STEP = re.compile(r"(?:step|weights)-(\d{8,15})\.ckpt")
DAMAGED = ".damaged"  # the suffix of a checkpoint that cannot be used
KEPT = 2  # checkpoints: the older one is there if the newer one is damaged
REQUIRED = {"state_dict", "config_hash", "global_step"}  # keys of every checkpoint file
SUMS, META = "SHA256SUMS", "meta.pt"  # in the folder of a distributed checkpoint; META is Lightning's name


class DamagedCheckpointError(Exception):
    """A checkpoint is not what was written, or never was one; the message says why in a few words."""


@dataclass(frozen=True)
class Start:
    """The checkpoint and the step from which a run resumes."""

    path: Path | None  # None: from the beginning
    step: int
    curves: dict[str, Any]  # the checkpoint's state of metrics.jsonl; empty at the beginning


class AtomicCheckpointIO(TorchCheckpointIO):
    """A writer that writes beside the target, syncs and renames, so that a kill leaves the previous checkpoint."""

    def __init__(self, config_hash: str) -> None:
        """Set the hash of the run's config, which goes into every checkpoint."""
        super().__init__()
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint with the config's hash to `path`; called by Lightning."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # written on another number of devices
            remove(target)
        write_file(checkpoint | {"config_hash": self.config_hash}, target)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint for one device or a copy of the model on each; called by Lightning."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, *args, **kwargs)
        saved = _load_distributed_checkpoint(Path(path))
        saved["optimizer_states"] = [saved.pop("optimizer_0")] if "optimizer_0" in saved else []
        return saved


def step_file(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after optimizer step `step`."""
    return folder / f"step-{step:08d}.ckpt"


def weights_file(folder: Path, step: int) -> Path:
    """Return the path of the weights after optimizer step `step`."""
    return folder / f"weights-{step:08d}.ckpt"


def part_of(target: Path) -> Path:
    """Return the path at which a folder is written before it gets its name."""
    return target.with_name(f".{target.name}{PARTIAL_SUFFIX}")


def in_folder(folder: Path) -> list[Path]:
    """Return the periodic checkpoints in a folder, newest first."""
    return sorted((path for path in folder.glob("step-*.ckpt") if STEP.fullmatch(path.name)), reverse=True)


def newest(folder: Path, config_hash: str, curves_trouble: Callable[[dict[str, Any]], str | None]) -> Start:
    """Return the newest valid checkpoint; newer damaged ones are renamed with the suffix `DAMAGED`.

    Args:
        folder: the folder of the checkpoints.
        config_hash: the hash of the run's config.
        curves_trouble: returns what is wrong with the curves that belong to a checkpoint, or None.

    Raises:
        UserError: a checkpoint belongs to another config.
    """
    for path in in_folder(folder):
        try:
            saved = facts(path)
            callbacks = saved.get("callbacks")
            curves = callbacks.get("Telemetry", {}) if isinstance(callbacks, dict) else {}
            trouble = curves_trouble(curves) if curves else "it holds only weights"
        except DamagedCheckpointError as error:
            trouble = str(error)
        else:
            if saved["config_hash"] != config_hash:
                raise UserError(f"{path} belongs to another config: move it away, or choose another name=")
            if trouble is None:
                return Start(path, saved["global_step"], curves)
        log.warning("%s cannot be used: %s", path, trouble)
        aside = path.with_name(path.name + DAMAGED)
        remove(aside)  # a folder cannot replace another
        path.replace(aside)
    return Start(None, 0, {})


def facts(path: Path) -> dict[str, Any]:
    """Return a verified checkpoint; of a folder what is not a tensor. Tensors of a file are memory-mapped.

    Raises:
        DamagedCheckpointError: it is not what was written, or not of the step in its name.
        OSError: the disk failed.
    """
    saved = _read_folder(path) if path.is_dir() else read_file(path)
    if (named := STEP.fullmatch(path.name)) and saved["global_step"] != int(named[1]):
        raise DamagedCheckpointError(f"it is of step {saved['global_step']!r:.20}")
    return saved


def read(path: Path) -> dict[str, Any]:
    """Return a verified checkpoint file, as `facts` does; nothing in it is executed."""
    if path.is_dir():
        raise DamagedCheckpointError("it is a distributed checkpoint, which can only resume its run")
    return facts(path)


def read_file(file: Path) -> dict[str, Any]:
    """Return what a file holds once its checksums are verified, which torch does not do; tensors are memory-mapped."""
    try:
        with zipfile.ZipFile(file) as archive:
            if (bad := archive.testzip()) is not None:
                raise DamagedCheckpointError(f"its part {bad} is damaged")
        saved = dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        if missing := sorted(REQUIRED - saved.keys()):
            raise DamagedCheckpointError(f"it has no {' and no '.join(missing)}")
    except (MemoryError, DamagedCheckpointError):
        raise
    except Exception as error:  # damage shows in as many ways as there are bytes
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedCheckpointError(type(error).__name__) from None
    return saved


def write_file(content: dict[str, Any], file: Path) -> None:
    """Write a checkpoint file beside its target, sync and rename it."""
    with atomic_write(file) as opened:
        torch.save(content, opened)


def publish(part: Path, target: Path) -> None:
    """Give the folder `part`, which every rank has written, its checksums and then its final name."""
    files = sorted(part.iterdir())
    (part / SUMS).write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in files))
    for path in (*files, part / SUMS, part):
        sync_to_disk(path)
    remove(target)
    part.replace(target)
    sync_to_disk(target.parent)


def _read_folder(folder: Path) -> dict[str, Any]:
    try:
        sums = dict(line.split(maxsplit=1)[::-1] for line in (folder / SUMS).read_text().splitlines())
        damaged = [name for name, digest in sums.items() if _sha256(folder / Path(name).name) != digest]
    except (FileNotFoundError, ValueError) as error:
        raise DamagedCheckpointError(f"{type(error).__name__}: {error}") from None
    if damaged or META not in sums:
        raise DamagedCheckpointError(f"its part {[*damaged, META][0]} is damaged")
    return dict(torch.load(folder / META, map_location="cpu", weights_only=True))


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder, if it is there; the name of a folder goes first."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f".{path.name}.removed{PARTIAL_SUFFIX}")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(path.replace(aside))
    else:
        path.unlink(missing_ok=True)


def warnings(folder: Path) -> list[str]:
    """Return a sentence for each checkpoint that was found damaged, by this process or an earlier one."""
    return [
        f"{path.name.removesuffix(DAMAGED)} was damaged: the run resumed from an older checkpoint, or from its start"
        for path in sorted(folder.glob(f"*{DAMAGED}"))
    ]


def remove_periodic(folder: Path) -> None:
    """Remove the periodic and the damaged checkpoints of a finished run."""
    for path in [*in_folder(folder), *folder.glob(f"*{DAMAGED}")]:
        remove(path)


class Checkpoints(Checkpoint):
    """Saves after whole optimizer steps; Lightning calls a `Checkpoint` after all other callbacks.

    All ranks save or stop together when one of them has received a signal or finds that a checkpoint is due.
    """

    def __init__(self, folder: Path, every: int, seconds: float, keep_weights_every: int) -> None:
        """Set when to save.

        Args:
            folder: the folder of the checkpoints.
            every: steps between two checkpoints, of which the two newest stay; the last step has one too.
            seconds: the age of the last checkpoint at which another is due; 0: never.
            keep_weights_every: steps between weights that all stay, for analyses; 0: never.
        """
        self.folder, self.every, self.seconds, self.keep_weights_every = folder, every, seconds, keep_weights_every
        self.start = 0  # the step from which the run resumes
        self.request = StopRequest()
        self._listening = ExitStack()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Listen for signals; Lightning has set its own handlers by now."""
        self._step, self._saved = trainer.global_step, time.monotonic()
        self._listening.enter_context(self.request.listening())

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop listening."""
        self._listening.close()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Listen in a validation outside of training too; on several ranks Lightning's handlers deadlock."""
        if trainer.state.fn != "fit":
            self._listening.enter_context(self.request.listening())

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop listening, unless training continues."""
        if trainer.state.fn != "fit":
            self._listening.close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Stop listening, however training ends."""
        self._listening.close()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Save what is due after an optimizer step; if a signal came, save a checkpoint and stop.

        Raises:
            StoppedError: a signal came that no other handler waits for.
        """
        step = trainer.global_step
        if step == self._step:  # a micro-batch of a step that is not complete
            return
        self._step = step
        if self.keep_weights_every and step % self.keep_weights_every == 0:
            trainer.save_checkpoint(weights_file(self.folder, step), weights_only=True)
        number = max_over_ranks(self.request.number)
        if number or step % self.every == 0 or step == trainer.max_steps or self._time_is_up():
            self._save(trainer)
        if number:
            self.request.obey(number, step)

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Save and stop within a validation if a signal came that no other handler waits for.

        The resumed run repeats the whole validation. Outside of training there is nothing to save.

        Raises:
            StoppedError: such a signal came.
        """
        if trainer.state.fn != "fit":
            if number := max_over_ranks(self.request.number):
                self.request.obey(number, max(self.start, trainer.global_step))
        elif number := max_over_ranks(self.request.urgent):
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()
            self._save(trainer)
            raise StoppedError(number, trainer.global_step)

    def _time_is_up(self) -> bool:
        return self.seconds > 0 and max_over_ranks(time.monotonic() - self._saved >= self.seconds) > 0

    def _save(self, trainer: L.Trainer) -> None:
        path = step_file(self.folder, trainer.global_step)
        if not on_rank_zero(path.exists):
            trainer.save_checkpoint(path)
        self._saved = time.monotonic()
        if is_rank_zero():
            for old in in_folder(self.folder)[KEPT:]:
                remove(old)

"""Checkpoints: saved atomically, verified when read; a run resumes from the newest valid checkpoint.

    step-<N>.ckpt     to resume from: one file, or with FSDP a folder of Lightning's distributed checkpoint
    weights-<N>.ckpt  weights kept for analyses (trainer.keep_every)
    final.ckpt        weights of the finished run

torch's zip format has a CRC for each tensor of a file; a folder has SHA256SUMS. The index of a folder is a pickle, so
folders are only read to resume the run that wrote them.

Lightning's `ModelCheckpoint` is not used, for three reasons. It saves before the validation due after the same step,
which a resumed run then skips. It does not remove the checkpoint saved just before a kill. Its writer is not atomic
across file systems.
"""

import errno
import hashlib
import logging
import re
import shutil
import time
import zipfile
from collections.abc import Callable
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
FINAL = "final.ckpt"  # the weights at the end of training
DAMAGED = ".damaged"  # suffix of a checkpoint that cannot be used
KEPT = 2  # number of checkpoints to keep, in case the newest is damaged
REQUIRED = {"state_dict", "config_hash", "global_step"}  # keys of every checkpoint file
SUMS, META = "SHA256SUMS", "meta.pt"  # in the folder of a distributed checkpoint; META is Lightning's name


class DamagedCheckpointError(Exception):
    """A checkpoint is corrupt or not a checkpoint; the message is a short reason."""


@dataclass(frozen=True)
class Start:
    """The checkpoint from which a run resumes."""

    path: Path | None = None  # None: train from the beginning
    step: int = 0
    curves: dict[str, Any] | None = None  # size and SHA-256 of metrics.jsonl when the checkpoint was saved


def find_newest(folder: Path, config_hash: str, find_curves_damage: Callable[[dict[str, Any]], str | None]) -> Start:
    """Return the newest valid checkpoint, and rename newer damaged ones.

    Args:
        folder: the folder of the checkpoints.
        config_hash: the hash of the run's config.
        find_curves_damage: returns a message if the curves of a checkpoint are damaged, else None.

    Raises:
        UserError: a checkpoint belongs to another config.
    """
    for path in periodic_checkpoints(folder):
        try:
            saved = verify(path)
            callbacks = saved.get("callbacks")
            curves = callbacks.get("MetricsLogger") if isinstance(callbacks, dict) else None
            damage = find_curves_damage(curves) if curves else "it contains only weights"
        except DamagedCheckpointError as error:
            damage = str(error)
        else:
            if saved["config_hash"] != config_hash:
                raise UserError(f"{path} belongs to another config: move it away, or choose another name=")
            if damage is None:
                return Start(path, saved["global_step"], curves)
        log.warning("%s cannot be used: %s", path, damage)
        renamed = path.with_name(path.name + DAMAGED)
        remove(renamed)  # a folder cannot replace another
        path.replace(renamed)
    return Start()


def periodic_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints to resume from, newest first."""
    return sorted((path for path in folder.glob("step-*.ckpt") if STEP.fullmatch(path.name)), reverse=True)


def read(path: Path) -> dict[str, Any]:
    """Return a verified checkpoint file. Nothing in it is executed; tensors are memory-mapped.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged, or is a folder.
        OSError: the disk failed.
    """
    if path.is_dir():
        raise DamagedCheckpointError("it is a distributed checkpoint, which can only resume its run")
    return verify(path)


def verify(path: Path) -> dict[str, Any]:
    """Return a verified checkpoint, like `read`; for a folder, everything except the tensors."""
    saved = _read_folder(path) if path.is_dir() else _read_file(path)
    name = STEP.fullmatch(path.name)
    if name and saved["global_step"] != int(name[1]):
        raise DamagedCheckpointError(f"it is of step {saved['global_step']!r:.20}")
    return saved


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            if (bad := archive.testzip()) is not None:  # torch.load does not check the CRCs
                raise DamagedCheckpointError(f"its part {bad} is damaged")
        saved = dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        if missing := sorted(REQUIRED - saved.keys()):
            raise DamagedCheckpointError(f"it has no {' and no '.join(missing)}")
    except (MemoryError, DamagedCheckpointError):
        raise
    except Exception as error:  # a damaged file raises almost any exception
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedCheckpointError(type(error).__name__) from None
    return saved


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


def write_file(content: dict[str, Any], file: Path) -> None:
    """Write a checkpoint file atomically: write a temporary file, sync it and rename it."""
    with atomic_write(file) as opened:
        torch.save(content, opened)


def publish_folder(part: Path, target: Path) -> None:
    """Add checksums to a folder that every rank has written, sync it and give it its final name."""
    files = sorted(part.iterdir())
    (part / SUMS).write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in files))
    for path in (*files, part / SUMS, part):
        sync_to_disk(path)
    remove(target)
    part.replace(target)
    sync_to_disk(target.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint if it exists; a folder is renamed first, so that a kill never leaves a partial checkpoint."""
    if path.is_dir() and not path.is_symlink():
        renamed = path.with_name(f".{path.name}.removed{PARTIAL_SUFFIX}")
        shutil.rmtree(renamed, ignore_errors=True)
        shutil.rmtree(path.replace(renamed))
    else:
        path.unlink(missing_ok=True)


def damage_warnings(folder: Path) -> list[str]:
    """Return a warning for each checkpoint found damaged by this or an earlier process."""
    return [
        f"{path.name.removesuffix(DAMAGED)} was damaged: the run resumed from an older checkpoint or started over"
        for path in sorted(folder.glob(f"*{DAMAGED}"))
    ]


def remove_periodic(folder: Path) -> None:
    """Remove the periodic and the damaged checkpoints of a finished run."""
    for path in [*periodic_checkpoints(folder), *folder.glob(f"*{DAMAGED}")]:
        remove(path)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint to a temporary file and renames it, so a kill leaves the previous checkpoint intact."""

    def __init__(self, config_hash: str) -> None:
        super().__init__()
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, together with the hash of the run's config, to `path`."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # written by FSDP on another number of devices
            remove(target)
        write_file(checkpoint | {"config_hash": self.config_hash}, target)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint for one device or DDP, even if FSDP wrote it."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, *args, **kwargs)
        saved = _load_distributed_checkpoint(Path(path))
        saved["optimizer_states"] = [saved.pop("optimizer_0")] if "optimizer_0" in saved else []
        return saved


class Checkpoints(Checkpoint):
    """Saves after complete optimizer steps. Lightning calls a `Checkpoint` after all other callbacks.

    All ranks save or stop together when one of them has received a signal or finds that a checkpoint is due.
    """

    def __init__(self, folder: Path, every: int, seconds: float, keep_weights_every: int) -> None:
        """Set when to save.

        Args:
            folder: the folder of the checkpoints.
            every: steps between checkpoints; the two newest are kept. The last step is always saved.
            seconds: seconds after the last checkpoint at which another one is due; 0: never.
            keep_weights_every: steps between weights-only checkpoints kept for analyses; 0: never.
        """
        self.folder, self.every, self.seconds, self.keep_weights_every = folder, every, seconds, keep_weights_every
        self.start = 0  # the step from which the run resumes
        self.earlier, self._started = 0.0, time.perf_counter()  # seconds of earlier processes, up to the checkpoint
        self.request = StopRequest()

    @property
    def total_seconds(self) -> float:
        """The running time of the run, including earlier processes up to the checkpoint that they saved."""
        return self.earlier + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"seconds": self.total_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        self.earlier = state_dict["seconds"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock for time-based checkpoints."""
        self._step, self._saved = trainer.global_step, time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Save the checkpoints due after an optimizer step; after a signal, save and stop.

        Raises:
            StoppedError: a signal was received that no other program handles.
        """
        step = trainer.global_step
        if step == self._step:  # the step has more micro-batches
            return
        self._step = step
        if self.keep_weights_every and step % self.keep_weights_every == 0:
            trainer.save_checkpoint(self.folder / f"weights-{step:08d}.ckpt", weights_only=True)
        number = max_over_ranks(self.request.number)
        if number or step % self.every == 0 or step == trainer.max_steps or self._time_is_up():
            self._save(trainer)
        if number:
            self.request.stop(number, step)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop during a validation after a signal; the resumed run repeats the full validation.

        Raises:
            StoppedError: a signal was received that no other program handles.
        """
        if trainer.state.fn != "fit":  # before or after training; there is nothing to save
            if number := max_over_ranks(self.request.number):
                self.request.stop(number, max(self.start, trainer.global_step))
        elif number := max_over_ranks(self.request.urgent):
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()
            self._save(trainer)
            raise StoppedError(number, trainer.global_step)

    def _time_is_up(self) -> bool:
        return self.seconds > 0 and max_over_ranks(time.monotonic() - self._saved >= self.seconds) > 0

    def _save(self, trainer: L.Trainer) -> None:
        path = self.folder / f"step-{trainer.global_step:08d}.ckpt"
        if not on_rank_zero(path.exists):  # rewriting it would risk damage if the run is killed
            trainer.save_checkpoint(path)
        self._saved = time.monotonic()
        if is_rank_zero():
            for old in periodic_checkpoints(self.folder)[KEPT:]:
                remove(old)

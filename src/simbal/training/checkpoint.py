"""Checkpoints: written whole or not at all, verified when they are read, and the one to continue a run from."""

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from simbal.distributed import from_first, is_first, largest
from simbal.errors import UserError
from simbal.training import shards
from simbal.training.checkpoint_file import DamagedCheckpointError, read_file, write_file
from simbal.training.stop import StoppedError, StopRequest

log = logging.getLogger("simbal")
STEP = re.compile(r"(?:step|weights)-(\d{8,15})\.ckpt")
DAMAGED = ".damaged"  # the suffix of a checkpoint that cannot be used
KEPT = 2  # checkpoints: the older is there if the newer is damaged


class AtomicCheckpointIO(TorchCheckpointIO):
    """A writer of checkpoints that writes beside the target, syncs and renames.

    A kill at any moment leaves the previous checkpoint whole. Lightning's own writer copies onto the final name when
    the temporary folder is on another disk.
    """

    def __init__(self, config_hash: str) -> None:
        """Set the hash of the run's config, which goes into every checkpoint."""
        super().__init__()
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint with the config's hash to `path`; called by Lightning."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # of another number of devices
            shards.remove(target)
        write_file(checkpoint | {"config_hash": self.config_hash}, target)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint for one device, or for a copy of the model on each of several; called by Lightning."""
        if Path(path).is_dir():
            return shards.assembled(Path(path))
        return super().load_checkpoint(path, *args, **kwargs)


@dataclass(frozen=True)
class Start:
    """The checkpoint and the step from which a run goes on."""

    path: Path | None  # the checkpoint; None: from the beginning
    step: int
    curves: dict[str, Any]  # the checkpoint's state of metrics.jsonl at that step; empty at the beginning


def step_file(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after optimizer step `step`."""
    return folder / f"step-{step:08d}.ckpt"


def weights_file(folder: Path, step: int) -> Path:
    """Return the path of the weights alone after optimizer step `step`."""
    return folder / f"weights-{step:08d}.ckpt"


def in_folder(folder: Path) -> list[Path]:
    """Return the periodic checkpoints in a folder, newest first."""
    return sorted((path for path in folder.glob("step-*.ckpt") if STEP.fullmatch(path.name)), reverse=True)


def newest(folder: Path, config_hash: str, curves_trouble: Callable[[dict[str, Any]], str | None]) -> Start:
    """Return the newest checkpoint that is whole and fits; newer ones are renamed with the suffix `DAMAGED`.

    Args:
        folder: the folder of the checkpoints.
        config_hash: the hash of the run's config.
        curves_trouble: says what is wrong with the curves beside which a checkpoint was written, or None.

    Raises:
        UserError: a checkpoint belongs to another config.
    """
    for path in in_folder(folder):
        try:
            saved = facts(path)
            callbacks = saved.get("callbacks")
            curves = callbacks.get("Telemetry", {}) if isinstance(callbacks, dict) else {}
            trouble = curves_trouble(curves) if curves else "it holds weights alone"
        except DamagedCheckpointError as error:
            trouble = str(error)
        else:
            if saved["config_hash"] != config_hash:
                raise UserError(f"{path} belongs to another config: move it away, or choose another name=")
            if trouble is None:
                return Start(path, saved["global_step"], curves)
        log.warning("%s cannot be used: %s", path, trouble)
        aside = path.with_name(path.name + DAMAGED)
        shards.remove(aside)  # of the same step, from before: a folder gives no way to another
        path.replace(aside)
    return Start(None, 0, {})


def read(path: Path) -> dict[str, Any]:
    """Return all of a checkpoint, a file or a folder of shards, once its checksums are verified.

    Tensors of a file are mapped, those of shards put together. Nothing in it is executed.

    Raises:
        DamagedCheckpointError: it is not what was written, or not what its name says.
        OSError: the disk's fault.
    """
    saved = facts(path)
    return shards.assembled(path) if path.is_dir() else saved


def facts(path: Path) -> dict[str, Any]:
    """Return a checkpoint as `read` does, but without the tensors of one in shards."""
    saved = shards.verified(path) if path.is_dir() else read_file(path)
    if (named := STEP.fullmatch(path.name)) and saved["global_step"] != int(named[1]):
        raise DamagedCheckpointError(f"it is that of step {saved['global_step']!r:.20}")
    return saved


def warnings(folder: Path) -> list[str]:
    """Return a sentence for each checkpoint that was found damaged, by this process or an earlier one."""
    return [
        f"{path.name.removesuffix(DAMAGED)} was damaged: the run went on from an older one, or from its start"
        for path in sorted(folder.glob(f"*{DAMAGED}"))
    ]


def remove_periodic(folder: Path) -> None:
    """Remove the periodic and the damaged checkpoints of a finished run, which needs them no more."""
    for path in [*in_folder(folder), *folder.glob(f"*{DAMAGED}")]:
        shards.remove(path)


class Saving(Checkpoint):
    """A callback that saves after an optimizer step, never inside one; a `Checkpoint` comes after other callbacks.

    Where several processes train one model, all save or stop when one of them has a signal or finds that it is time.
    """

    def __init__(self, folder: Path, every: int, seconds: float, keep_weights_every: int) -> None:
        """Set when to save.

        Args:
            folder: the folder of the checkpoints.
            every: steps between two checkpoints, of which the last step has one too; the two newest stay.
            seconds: the age of the last checkpoint at which one is due too; 0: never.
            keep_weights_every: steps between weights that all stay, for analyses; 0: never.
        """
        self.folder, self.every, self.seconds, self.keep_weights_every = folder, every, seconds, keep_weights_every
        self.start = 0  # the step from which the run goes on
        self.request = StopRequest()
        self._listening = ExitStack()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start to listen for signals; Lightning has set handlers of its own by now."""
        self._step, self._saved = trainer.global_step, time.monotonic()
        self._listening.enter_context(self.request.listening())

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop listening."""
        self._listening.close()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Listen in a validation before training and after it, too: on several ranks Lightning's handlers deadlock."""
        if trainer.state.fn != "fit":
            self._listening.enter_context(self.request.listening())

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop listening, if training does not go on."""
        if trainer.state.fn != "fit":
            self._listening.close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Stop listening, however training ends."""
        self._listening.close()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Save what is due after an optimizer step; if a signal has come, save a checkpoint and obey it.

        Raises:
            StoppedError: a signal has come for which nobody else waits.
        """
        step = trainer.global_step
        if step == self._step:  # a micro-batch of a step that is not complete
            return
        self._step = step
        if self.keep_weights_every and step % self.keep_weights_every == 0:
            trainer.save_checkpoint(weights_file(self.folder, step), weights_only=True)
        number = largest(self.request.number)
        if number or step % self.every == 0 or step == trainer.max_steps or self._time_is_up():
            self._save(trainer)
        if number:
            self.request.obey(number, step)

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Save and stop within a validation if a signal has come for which nobody else waits.

        The validation is made again, whole, when the run goes on. Before training and after it nothing is to be saved.

        Raises:
            StoppedError: such a signal has come.
        """
        if trainer.state.fn != "fit":
            if number := largest(self.request.number):
                self.request.obey(number, max(self.start, trainer.global_step))
        elif number := largest(self.request.urgent):
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()
            self._save(trainer)
            raise StoppedError(number, trainer.global_step)

    def _time_is_up(self) -> bool:
        return self.seconds > 0 and largest(time.monotonic() - self._saved >= self.seconds) > 0

    def _save(self, trainer: L.Trainer) -> None:
        path = step_file(self.folder, trainer.global_step)
        if not from_first(path.exists):
            trainer.save_checkpoint(path)
        self._saved = time.monotonic()
        if is_first():
            for old in in_folder(self.folder)[KEPT:]:
                shards.remove(old)

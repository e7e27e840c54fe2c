"""When a run is saved: by steps, by time, and when it is asked to stop."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from simbal.data.loader import ValidationBatches
from simbal.training.checkpoint import in_folder, step_file, weights_file
from simbal.training.ranks import from_first, is_first, largest
from simbal.training.stop import StoppedError, StopRequest

KEPT = 2  # checkpoints: the older is there if the newer is damaged


class Saving(Checkpoint):
    """Saves after an optimizer step, never inside one. As a `Checkpoint`, it has its turn after other callbacks.

    Where several processes train one model, all do what one of them has been asked or finds to be time for.
    """

    def __init__(self, folder: Path, every: int, seconds: float, keep_weights_every: int) -> None:
        """
        Args:
            folder: of the checkpoints.
            every: steps between two; the two newest stay.
            seconds: after which one is due too; 0: never.
            keep_weights_every: steps between weights that all stay, for analyses; 0: never.
        """
        self.folder, self.every, self.seconds, self.keep_weights_every = folder, every, seconds, keep_weights_every
        self.request = StopRequest()
        self._listening = ExitStack()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Lightning has set handlers of its own by now."""
        self._step, self._saved = trainer.global_step, time.monotonic()
        self._listening.enter_context(self.request.heard())

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """What comes after the last step can be done again."""
        self._listening.close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """However training ends."""
        self._listening.close()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Raises StoppedError once what was asked for is saved, if nobody else waits for the signal."""
        step = trainer.global_step
        if step == self._step:  # a micro-batch of a step that is not complete
            return
        self._step = step
        if self.keep_weights_every and step % self.keep_weights_every == 0:
            trainer.save_checkpoint(weights_file(self.folder, step), weights_only=True)
        number = largest(self.request.number)
        if number or step % self.every == 0 or self._time_is_up():
            self._save(trainer)
        if number:
            self.request.obey(number, step)

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """A validation is made again, whole, when the run goes on; one that may go on at once is not broken off."""
        if trainer.state.fn != "fit" or batch_idx >= cast(ValidationBatches, trainer.val_dataloaders).on_every_rank:
            return
        if number := largest(self.request.urgent):
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
                old.unlink()

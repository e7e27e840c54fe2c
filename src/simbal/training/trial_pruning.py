"""Stops a run whose sweep has given up on it: the trial of a search whose curve is worse than those of others."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from simbal.run_folder import PRUNE_FILE
from simbal.training.ranks import from_first, is_first, largest


class PrunedError(Exception):
    """The run was stopped on purpose; says why."""


class TrialPruning(Callback):
    """Looks before every batch whether the sweep has written its word, which takes microseconds.

    A word from before this process is stale: the sweep repeats one that holds. Only the first of several ranks looks.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / PRUNE_FILE

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Forget what an earlier sweep has said."""
        if is_first():
            self.file.unlink(missing_ok=True)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Raises PrunedError if the sweep has said so."""
        if largest(is_first() and self.file.exists()):
            reason = from_first(self._read)
            raise PrunedError(f"{reason}; stopped at step {trainer.global_step}")

    def _read(self) -> str:
        reason = str(json.loads(self.file.read_text(encoding="utf-8"))["reason"])
        self.file.unlink()
        return reason

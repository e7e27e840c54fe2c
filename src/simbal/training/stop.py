"""Stops a run before its last step: after a checkpoint for a signal, or at once for a search that prunes it."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from simbal.distributed import from_first, is_first, largest
from simbal.runs.folder import PRUNE_FILE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal is one of the last two


class StoppedError(SystemExit):
    """The run was asked to stop and has been saved; the exit code is 128 + the signal, as a shell's."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name} at step {step}: the same command goes on from there"


class PrunedError(Exception):
    """The run was stopped on purpose; the message says why."""


class StopRequest:
    """A request to stop, which a signal makes.

    A second signal ends the process at once, unless somebody else waits for it.
    """

    def __init__(self) -> None:
        """Note who waits for a signal now; Lightning sets its handlers later."""
        self.number = 0  # the signal's number; 0: none has come
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        idle = signal.default_int_handler
        self._others = {number: wait for number, wait in handlers.items() if callable(wait) and wait is not idle}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals within the block, in place of whoever did (Lightning would leave without saving)."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def urgent(self) -> int:
        """The number of the signal, if nobody else waits for it; else 0."""
        return 0 if self.number in self._others else self.number

    def obey(self, number: int, step: int) -> None:
        """Leave once the run is saved, or call the handler of whoever waited for the signal, and go on if it returns.

        submitit's handler puts the job back into the queue and leaves.

        Raises:
            StoppedError: nobody else waited for the signal.
        """
        self.number = 0
        if number not in self._others:
            raise StoppedError(number, step)
        self._others[number](number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and number not in self._others:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number


class TrialPruning(Callback):
    """A callback that stops the run once the sweep has written prune.json, for which it looks before every batch.

    A look takes microseconds. A file from before this process is stale: the sweep writes again what still holds. Only
    the first of several ranks looks.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / PRUNE_FILE

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Remove a prune.json that an earlier sweep has left."""
        if is_first():
            self.file.unlink(missing_ok=True)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop if there is a prune.json.

        Raises:
            PrunedError: there is one; it says why.
        """
        if largest(is_first() and self.file.exists()):
            reason = from_first(self._read)
            raise PrunedError(f"{reason}; stopped at step {trainer.global_step}")

    def _read(self) -> str:
        reason = str(json.loads(self.file.read_bytes())["reason"])
        self.file.unlink()
        return reason

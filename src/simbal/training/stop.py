"""SIGINT, SIGTERM and a scheduler's warning of pre-emption end a run after the step in progress, with a checkpoint."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal is one of the last two


class StoppedError(SystemExit):
    """The run was asked to stop and has been saved; the exit code is 128 + the signal, as a shell's."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name} at step {step}: the same command goes on from there"


class StopRequest:
    """Whether a signal has asked to stop; a second one ends the process at once, unless somebody else waits for it."""

    def __init__(self) -> None:
        """Whoever waits for a signal now is somebody else; Lightning sets handlers later."""
        self.number = 0  # of the signal; 0: none has come
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        idle = signal.default_int_handler
        self._others = {number: wait for number, wait in handlers.items() if callable(wait) and wait is not idle}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen, in place of whoever listened before (Lightning would leave without saving)."""
        before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def urgent(self) -> int:
        """The signal, if nobody else waits for it; else 0."""
        return 0 if self.number in self._others else self.number

    def obey(self, number: int, step: int) -> None:
        """Once the run is saved: leave, or let somebody who waited for the signal have it, and go on if he lets us.

        submitit puts the job back into the queue and leaves.

        Raises:
            StoppedError: nobody did.
        """
        self.number = 0
        if number not in self._others:
            raise StoppedError(number, step)
        self._others[number](number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.number and number not in self._others:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number

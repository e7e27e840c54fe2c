"""Signals that ask a run to stop: it finishes its step, saves a checkpoint and exits.

Lightning's own handlers would lose the step on SIGINT, and can deadlock on several ranks.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal is one of the last two


class StoppedError(SystemExit):
    """A signal stopped the run, which is saved; the exit code is 128 + the signal, as in a shell."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name} at step {step}: rerun the command to resume"


class PrunedError(Exception):
    """A search pruned the run; the message says why."""


class StopRequest:
    """A request to stop, made by a signal; a second signal ends the process at once.

    Where another program has set a handler, as submitit does to requeue a job, that handler runs after the save.
    """

    def __init__(self) -> None:
        """Note the handlers that are set now; Lightning sets its own later."""
        self.number = 0  # the signal's number; 0: none has come
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        idle = signal.default_int_handler
        self._others = {number: wait for number, wait in handlers.items() if callable(wait) and wait is not idle}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals within the block, in place of the handlers that are set."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def urgent(self) -> int:
        """The number of the signal, if no other handler waits for it; else 0."""
        return 0 if self.number in self._others else self.number

    def obey(self, number: int, step: int) -> None:
        """Stop the run, which is saved, or call the other handler, and continue if that returns.

        Raises:
            StoppedError: no other handler waits for the signal.
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

"""Signals that stop a run: it finishes the current step, saves a checkpoint and exits.

They replace Lightning's own handlers, which lose the step on SIGINT and can deadlock on several ranks.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal is one of the last two


class StoppedError(SystemExit):
    """A signal stopped the run after a checkpoint was saved. The exit code is 128 + the signal, as in a shell."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name} at step {step}: rerun the command to resume"


class PrunedError(Exception):
    """A search pruned the run; the message says why."""


class StopRequest:
    """A signal that asks the run to stop. A second signal kills the process at once.

    If another program has installed a handler, as submitit does to requeue a job, that handler runs after the save.
    """

    def __init__(self) -> None:
        self.number = 0  # the number of the signal; 0: none was received
        self._previous: dict[int, Any] = {}

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Handle signals within the block, and restore the previous handlers afterwards."""
        self._previous = {number: signal.signal(number, self.handle_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; a second signal kills the process."""
        if self.number and not self._other_handler(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number

    @property
    def urgent(self) -> int:
        """The number of the signal if it must stop the run even during validation, else 0."""
        return 0 if self._other_handler(self.number) else self.number

    def stop(self, number: int, step: int) -> None:
        """Stop the run, whose checkpoint is saved; or call the other program's handler, and continue if it returns.

        Raises:
            StoppedError: no other program handles the signal.
        """
        self.number = 0
        handler = self._other_handler(number)
        if handler is None:
            raise StoppedError(number, step)
        handler(number, None)

    def _other_handler(self, number: int) -> Callable[[int, FrameType | None], Any] | None:
        handler = self._previous.get(number)
        return handler if callable(handler) and handler is not signal.default_int_handler else None

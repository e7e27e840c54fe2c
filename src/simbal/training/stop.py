"""SIGINT, SIGTERM and a scheduler's warning of pre-emption end a run after the step in progress, with a checkpoint."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal is one of the last two
IDLE = (signal.SIG_DFL, signal.default_int_handler)  # handlers of signals that nobody else waits for


class StoppedError(SystemExit):
    """The run was asked to stop and has been saved; the exit code is 128 + the signal, as a shell's."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name} at step {step}: the same command goes on from there"


class StopRequest:
    """Whether a signal has asked to stop; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # of the signal; 0: none has come
        # submitit waits for a signal of its own and puts the job back into the queue
        self._ours = [n for n in SIGNALS if n in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(n) in IDLE]

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen, in place of whoever listened before (Lightning would leave without saving)."""
        before = {number: signal.signal(number, self._hear) for number in self._ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number

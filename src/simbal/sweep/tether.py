"""Ties a job to the sweep that started it, so that a killed sweep leaves nothing running."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWEEP_PID = "SIMBAL_SWEEP_PID"  # environment variable: the process that started this one
POLL_SECONDS, GRACE_SECONDS = 0.5, 5.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_sweep() -> None:
    """Ask the kernel for SIGTERM when the sweep dies; without a sweep, or outside Linux, do nothing.

    The child asks for itself, as code between fork and exec (`preexec_fn`) is unsafe. The variable is taken
    away so that the job's own children, whose parent is not the sweep, do not read it.
    """
    sweep = os.environ.pop(SWEEP_PID, None)
    if sweep is not None:
        die_with(int(sweep), signal.SIGTERM)


def die_with(parent: int, number: signal.Signals) -> None:
    """Ask the kernel for the signal `number` when the process `parent` dies; outside Linux, do nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        raise SystemExit(128 + number)


@contextmanager
def tethered(sweep: int) -> Iterator[None]:
    """End this process when the process `sweep`, its parent, dies meanwhile; do nothing if that is not its parent.

    For a worker that runs job after job. The kernel's signal would not do: it comes when the thread ends that made the
    worker, and joblib has several.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if os.getppid() != sweep:
                os.kill(os.getpid(), signal.SIGTERM)
                done.wait(GRACE_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() == sweep:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()

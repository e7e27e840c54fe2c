"""Ties a job to the sweep that started it, so that a killed sweep leaves nothing running."""

import ctypes
import os
import signal
import sys

SWEEP_PID = "SIMBAL_SWEEP_PID"  # environment variable: the process that started this one
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_sweep() -> None:
    """Ask the kernel for SIGTERM when the sweep dies; without a sweep, or outside Linux, do nothing.

    The child asks for itself, as code between fork and exec (`preexec_fn`) is unsafe. The variable is taken
    away so that the job's own children, whose parent is not the sweep, do not read it.
    """
    sweep = os.environ.pop(SWEEP_PID, None)
    if sweep is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sweep):  # it died before we asked
        raise SystemExit(128 + signal.SIGTERM)

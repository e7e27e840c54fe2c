"""What a process of the fork server does: it becomes the program of one job."""

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


def become(command: list[str], environment: dict[str, str], console: str) -> None:
    """Run `command` (Python's path, then a file, or -m and a module, then arguments) as Python itself would.

    What it prints goes to the end of the file `console`. It leads a process group of its own, as a terminal's Ctrl-C
    must not reach it, and ends with the sweep.
    """
    os.setsid()
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    output = os.open(console, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    for text in (sys.stdout, sys.stderr):
        assert isinstance(text, io.TextIOWrapper)
        text.reconfigure(line_buffering=True)
    os.environ |= environment
    try:
        if command[1] == "-m":
            sys.argv = command[2:]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without it


def _end_with_sweep() -> None:
    """The fork server does not help: it outlives the sweep for as long as one of its processes runs."""
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    wait([sweep.sentinel])
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)

"""Start programs for tests."""

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

DEADLINE_SECONDS = 600  # until a test that hangs is given up, however slow the machine


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def holder(file: Path) -> int:
    """Return the process that has `file` open, as the holder of a lock has; 0 if there is none."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == file:
                return int(descriptor.parts[2])
        except OSError:  # it has ended
            continue
    return 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


def in_a_fork(work: Callable[[], object]) -> int:
    """The exit code of a fork of this process that does `work`; a negative one is the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which the fork uses none
        pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)  # without the endings of the tests
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

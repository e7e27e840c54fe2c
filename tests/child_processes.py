"""Programs that tests start."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_SECONDS = 600  # until a test that hangs is given up, however slow the machine


def hear_ctrl_c() -> None:
    """For `preexec_fn`: a shell that runs the tests in the background has them, and their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)

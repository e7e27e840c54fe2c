"""What a process of these tests does: it notes what it was given, and ends as it is told."""

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

from simbal.processes.start import read_task


def work(task: dict[str, Any]) -> int:
    """The exit code that `ending` says; or `raise`, or `wait` to be killed."""

    def note(line: str) -> None:
        with Path(task["notes"]).open("a") as file:
            file.write(f"{line}\n")

    ending, leads = task["ending"], os.getpid() == os.getpgid(0)
    atexit.register(note, "left in order")
    note(f"{ending} {os.environ.get('COLOUR')} leads={leads} decimal={'decimal' in sys.modules}")
    if ending == "raise":
        raise RuntimeError("of its own")
    if ending == "wait":
        time.sleep(1000)
    return int(ending)


if __name__ == "__main__":
    raise SystemExit(work(read_task()))

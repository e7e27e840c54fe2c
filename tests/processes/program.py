"""The process of a job in these tests: it records its task and environment, and ends as requested."""

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

from simbal.processes import read_task


def work(task: dict[str, Any]) -> int:
    """Return the exit code in `ending`; or raise for `raise`, or sleep for `wait`."""

    def note(line: str) -> None:
        with Path(task["notes"]).open("a") as file:
            file.write(f"{line}\n")

    ending, is_leader = task["ending"], os.getpid() == os.getpgid(0)
    atexit.register(note, "exited")
    note(f"{ending} {os.environ.get('COLOUR')} leader={is_leader} decimal={'decimal' in sys.modules}")
    if ending == "raise":
        raise RuntimeError("its own error")
    if ending == "wait":
        time.sleep(1000)
    return int(ending)


if __name__ == "__main__":
    raise SystemExit(work(read_task()))

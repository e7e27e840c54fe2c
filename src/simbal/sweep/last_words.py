"""Why a job ended without a result: what it said last, or what killed it."""

import signal
from pathlib import Path


def last_words(console: Path, start: int, exit_status: int) -> str:
    """One line: the signal, else the last `error: ...`, else the last traceback's last line, else the exit code.

    Args:
        console: the job's output.
        start: byte at which this attempt's output begins.
        exit_status: as `Popen.returncode`: negative for a signal.
    """
    if killed(exit_status):
        return f"killed by signal {-exit_status if exit_status < 0 else exit_status - 128}"
    with console.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = _raised(lines)
    if errors or raised:
        return (errors or raised)[-1]
    return f"ended with exit code {exit_status} and no result"


def killed(exit_status: int) -> bool:
    """Whether a signal ended it: at once, or SIGINT or SIGTERM after it had tidied up."""
    return exit_status < 0 or exit_status in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _raised(lines: list[str]) -> list[str]:
    """The line that ends each traceback: the first after its heading that is not indented."""
    found, inside = [], False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            found.append(line)
            inside = False
    return found

"""Why a job ended without a result: what it said last, or what killed it."""

import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
STARVED = (
    ", while the kernel killed a process for want of memory: a smaller trainer.micro_batch needs less, and so do fewer "
    "jobs at once (hydra.launcher.n_jobs)"
)


def oom_kills() -> int:
    """How many processes Linux has killed since its start as memory ran out, in any control group; 0 if unknown."""
    try:
        lines = VMSTAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def last_words(console: Path, start: int, exit_status: int, oom_kills_before: int | None = None) -> str:
    """One line: the signal, else the last `error: ...`, else the last traceback's last line, else the exit code.

    Args:
        console: the job's output.
        start: byte at which this attempt's output begins.
        exit_status: as `Popen.returncode`: negative for a signal.
        oom_kills_before: `oom_kills` when the job started; if it is more by now, a SIGKILL may have been one of them,
            which nothing tells for certain.
    """
    if killed(exit_status):
        starved = exit_status == -signal.SIGKILL and oom_kills_before is not None and oom_kills() > oom_kills_before
        number = -exit_status if exit_status < 0 else exit_status - 128
        return f"killed by signal {number}{STARVED if starved else ''}"
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

"""What a sweep knows of one of its runs while it is at it."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from simbal import strict_json
from simbal.record_schema import is_number
from simbal.run_folder import RunFolder
from simbal.sweep.job import Job

STEPS = ("step", "max_steps")
NUMBERS = (*STEPS, "loss", "tokens_per_second", "seconds_left")  # of progress.json
State = Literal["queued", "running", "elsewhere", "done", "pruned", "failed"]


@dataclass
class Attempt:
    """One run of the sweep; `error` says why it failed. One that is elsewhere is being written by another process."""

    job: Job
    label: str
    state: State = "queued"
    error: str = ""
    started: float | None = None  # seconds of the monotonic clock
    ended: float | None = None
    folder: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.job.spec.path)

    @property
    def seconds(self) -> float:
        """How long it ran, or has been running."""
        if self.started is None:
            return 0.0
        return (self.ended or time.monotonic()) - self.started

    def claim(self) -> bool:
        """Make the folder ready for a job; False if another process has finished the run meanwhile.

        Raises:
            BusyError: another process is writing the run.
            UserError: the folder belongs to another config, or cannot be written.
        """
        folder, spec = self.folder, self.job.spec
        with folder.lock():
            if folder.finished(spec):
                return False
            folder.write_spec(spec)
            folder.set_aside_damaged_record()
            for stale in ("record.json", "progress.json"):
                (folder.path / stale).unlink(missing_ok=True)
            return True

    def progress(self) -> dict[str, Any]:
        """What the job last said in progress.json of where it is; empty before its first word, and for nonsense."""
        try:
            said = strict_json.parse((self.folder.path / "progress.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return said if _is_progress(said) else {}


def _is_progress(said: Any) -> bool:
    """Whether all that is shown and computed with is a number where it is there; a step comes with their number."""
    if not isinstance(said, dict) or not all(said.get(key) is None or is_number(said[key]) for key in NUMBERS):
        return False
    steps = [said[key] for key in STEPS if key in said]
    return not steps or (len(steps) == 2 and None not in steps and 0 <= steps[0] <= steps[1] != 0)

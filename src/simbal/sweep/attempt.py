"""What a sweep knows of one of its runs while it is at it."""

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from simbal.run_folder import RunFolder
from simbal.sweep.job import Job

State = Literal["queued", "running", "done", "failed"]


@dataclass
class Attempt:
    """One run of the sweep; `error` says why it failed."""

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

    def progress(self) -> dict[str, Any]:
        """What the job last said in progress.json of where it is; empty before its first word."""
        try:
            said = json.loads((self.folder.path / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

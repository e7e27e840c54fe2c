"""The state of one run of a sweep while the sweep is running."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from simbal.errors import BusyError, UserError
from simbal.runs.folder import CONSOLE_FILE, RunFolder
from simbal.runs.record import read_progress
from simbal.sweep.composer import Job
from simbal.sweep.ending import Outcome, recorded_outcome

Kind = Literal["finished", "failed", "resumed", "new"]
State = Literal["queued", "running", "elsewhere", "done", "pruned", "failed"]


@dataclass
class Attempt:
    """A run of the sweep: how the sweep found it, and its state since; another process is writing one `elsewhere`."""

    job: Job
    label: str
    state: State = "queued"
    error: str = ""  # why it failed
    record: dict[str, Any] | None = None  # as the sweep found it
    started: float | None = None  # seconds of the monotonic clock
    ended: float | None = None
    kind: Kind = "new"  # as the sweep found it; a finished or failed one is left as it is
    note: str = ""  # a sentence for people, if there is anything to know
    tokens: str = ""  # the fingerprint of the data that a finished run was trained on
    folder: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.job.spec.path)

    @property
    def seconds(self) -> float:
        """The seconds that it ran, or has been running."""
        if self.started is None:
            return 0.0
        return (self.ended or time.monotonic()) - self.started

    def claim(self) -> Outcome | None:
        """Make the folder ready for a job, and return None; or return why none is to start, and what to say of it.

        Another process is writing the run or has ended it meanwhile, or the folder belongs to another config or cannot
        be written.
        """
        folder, spec = self.folder, self.job.spec
        try:
            with folder.lock():
                folder.belongs_to(spec)
                folder.set_aside_damaged_record()
                record = folder.read_record()
                if record is not None and record["status"] != "killed" and record != self.record:
                    return recorded_outcome(folder, spec)
                for stale in ("record.json", "progress.json"):
                    (folder.path / stale).unlink(missing_ok=True)
                folder.write_spec(spec)
                return None
        except BusyError as busy:
            return "elsewhere", str(busy)
        except UserError as error:
            return "failed", str(error)

    def console_size(self) -> int:
        """Return the bytes of what the run's jobs have printed so far."""
        console = self.folder.path / CONSOLE_FILE
        return console.stat().st_size if console.exists() else 0

    def progress(self) -> dict[str, Any]:
        """Return what progress.json says; empty before there is one, and for one that makes no sense."""
        return read_progress(self.folder.path)

"""Starts jobs by Slurm: those that are started at once are an array, whose elements are each given a run's folder.

submitit writes the script, and puts a job that is out of time or pre-empted back into the queue. Whether a job has
ended squeue is asked, as many clusters keep no account that sacct could tell.
"""

import io
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import submitit

from simbal.errors import BUSY, UserError
from simbal.processes import Task
from simbal.sweep.worker import work_on

LOOK_SECONDS = 5.0  # between two questions to Slurm
WAITING = ("PENDING", "CONFIGURING")  # for a node, or for the node to boot


class SlurmStarter:
    """A way to start processes: each is a job of Slurm, which may wait for hours, and outlives this program."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], max_num_timeout: int) -> None:
        """Make it.

        Args:
            folder: of scripts and logs, which all nodes see.
            parameters: of the script, as submitit names them.
            max_num_timeout: how often a job that is out of time is queued again.

        Raises:
            UserError: there is no Slurm here, or it has no such parameter.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"hydra/launcher=slurm: {folder}: {error.strerror}") from None
        try:
            self.executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=max_num_timeout)
            self.executor.update_parameters(**parameters)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise UserError(f"hydra/launcher=slurm: {str(error).partition(chr(10))[0]}") from None
        self.new: list[SlurmJob] = []
        self.unwanted: list[str] = []
        self.states: dict[str, str] = {}  # of the jobs that have not ended, in Slurm's words
        self.looked = 0.0

    def start(self, task: Task, environment: Mapping[str, str]) -> "SlurmJob":
        """Start a job; those that are started before the next look at any of them are one array."""
        self.new.append(SlurmJob(self, Work(task, dict(environment))))
        return self.new[-1]

    def look(self) -> None:
        """Submit what is new, cancel what is not wanted any more, and every few seconds ask Slurm what it has.

        Raises:
            UserError: Slurm takes no jobs.
        """
        if self.new:
            self._submit()
        if self.unwanted:
            _asked("scancel", *self.unwanted)
            self.unwanted.clear()
        if time.monotonic() - self.looked > LOOK_SECONDS:
            self.looked = time.monotonic()
            said = _asked("squeue", "--me", "--noheader", "--array", "--format=%i %T")
            if said is not None:  # otherwise all is as it was, until Slurm answers again
                self.states = dict(line.split() for line in said.splitlines())

    def _submit(self) -> None:
        new, self.new = [job for job in self.new if not job.cancelled], []
        try:
            with redirect_stderr(io.StringIO()), self.executor.batch():  # submitit prints what it raises
                jobs = [self.executor.submit(job.work) for job in new]
        except (OSError, submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            said = "; ".join(line.removeprefix("sbatch: error: ") for line in str(error).strip().splitlines())
            raise UserError(f"hydra/launcher=slurm: sbatch takes no jobs: {said}") from None
        for job, submitted in zip(new, jobs, strict=True):
            job.submitted = submitted
            self.states[submitted.job_id] = "PENDING"
        self.looked = time.monotonic()


class SlurmJob:
    """The process of a job, wherever Slurm runs it, and however often it is queued again."""

    def __init__(self, starter: SlurmStarter, work: "Work") -> None:
        self.starter, self.work = starter, work
        self.submitted: submitit.Job[int] | None = None
        self.cancelled = False

    def begun(self) -> bool:
        """Whether Slurm has started it, by its last answer; one that is queued again has not begun."""
        return self.submitted is not None and self.starter.states.get(self.submitted.job_id) not in WAITING

    def poll(self) -> int | None:
        """Return None while it waits or runs, then what `work_on` has returned; 1 if that failed, -9 if killed."""
        self.starter.look()
        if self.submitted is None:  # cancelled before, or not taken
            return -signal.SIGKILL
        if not self.cancelled and self.submitted.job_id in self.starter.states:  # nothing is read before it has ended
            return None
        self.submitted.paths.submitted_pickle.unlink(missing_ok=True)
        if not self.submitted.paths.result_pickle.exists():
            return -signal.SIGKILL
        return 1 if self.submitted.exception() else self.submitted.result()

    def wait(self) -> int:
        """Wait for its end, and return the same; for that of a cancelled job Slurm alone waits."""
        while (code := self.poll()) is None:
            time.sleep(LOOK_SECONDS)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Cancel it, at the next look: Slurm sends SIGTERM, and SIGKILL a while later."""
        if self.submitted and not self.cancelled and not self.submitted.paths.result_pickle.exists():
            self.starter.unwanted.append(self.submitted.job_id)
        self.cancelled = True


class Work:
    """The function of a job, which submitit calls there, and once more for a job that was queued again."""

    def __init__(self, task: Task, environment: dict[str, str]) -> None:
        self.task, self.environment = task | {"sweep": None}, environment  # it outlives the sweep

    def __call__(self) -> int:
        """Do the run, and return what `work_on` does; leave at once if it was stopped, for submitit to see."""
        os.environ.update(self.environment)
        code = work_on(self.task)
        if code not in (0, 1, BUSY):
            raise SystemExit(code)
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return what to do after being queued again: the same, as the run goes on from its own checkpoint."""
        return submitit.helpers.DelayedSubmission(self)


def _asked(*command: str) -> str | None:
    """Return what a program of Slurm prints; None if it cannot tell now."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout

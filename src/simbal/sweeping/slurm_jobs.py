"""Jobs of Slurm: jobs that are started together form one array, and each element receives the folder of a run.

submitit writes the batch script, and requeues a job that timed out or was preempted. `squeue` shows whether a job
has ended, because many clusters keep no accounting data for `sacct`.
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
from simbal.sweeping.worker import work

POLL_SECONDS = 5.0  # between two calls of squeue
WAITING = ("PENDING", "CONFIGURING")


class SlurmStarter:
    """Start each job with Slurm. A job may wait for hours, and outlives this program."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], max_num_timeout: int) -> None:
        """Check that Slurm is installed and accepts the parameters.

        Args:
            folder: a folder for scripts and logs on a disk that all nodes share.
            parameters: parameters of the batch script, as submitit names them.
            max_num_timeout: how often a job that timed out is requeued.

        Raises:
            UserError: Slurm is not installed, or a parameter is invalid.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=max_num_timeout)
            self.executor.update_parameters(**parameters)
        except (OSError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise UserError(f"hydra/launcher=slurm: {str(error).partition(chr(10))[0]}") from None
        self.new: list[SlurmJob] = []
        self.to_cancel: list[str] = []
        self.states: dict[str, str] = {}  # of jobs that have not ended, as squeue prints them
        self.polled = 0.0

    def start(self, task: Task, environment: Mapping[str, str]) -> "SlurmJob":
        """Start a job. All jobs that are started before the next poll form one array."""
        self.new.append(SlurmJob(self, Work(task, dict(environment))))
        return self.new[-1]

    def poll(self) -> None:
        """Submit new jobs, cancel the jobs that received a signal, and update the states every few seconds.

        Raises:
            UserError: Slurm rejects the jobs.
        """
        if self.new:
            self._submit()
        if self.to_cancel:
            subprocess.run(["scancel", *self.to_cancel], capture_output=True, check=False)
            self.to_cancel.clear()
        if time.monotonic() - self.polled > POLL_SECONDS:
            self.polled = time.monotonic()
            command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:  # otherwise keep the last states until Slurm answers again
                self.states = dict(line.split() for line in done.stdout.splitlines())

    def _submit(self) -> None:
        new, self.new = [job for job in self.new if not job.is_cancelled], []
        try:
            with redirect_stderr(io.StringIO()), self.executor.batch():  # submitit also prints the errors it raises
                jobs = [self.executor.submit(job.work) for job in new]
        except (OSError, submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            reason = "; ".join(line.removeprefix("sbatch: error: ") for line in str(error).strip().splitlines())
            raise UserError(f"hydra/launcher=slurm: sbatch rejects the jobs: {reason}") from None
        for job, submitted in zip(new, jobs, strict=True):
            job.submitted = submitted
            self.states[submitted.job_id] = "PENDING"
        self.polled = time.monotonic()


class SlurmJob:
    """The process of a job, on any node and however often it is requeued."""

    def __init__(self, starter: SlurmStarter, work: "Work") -> None:
        self.starter, self.work = starter, work
        self.submitted: submitit.Job[int] | None = None
        self.is_cancelled = False

    def begun(self) -> bool:
        """Return whether Slurm has started the job. A requeued job has not begun."""
        return self.submitted is not None and self.starter.states.get(self.submitted.job_id) not in WAITING

    def poll(self) -> int | None:
        """Return None while the job waits or runs, then its exit code; -9 if it was killed."""
        self.starter.poll()
        if self.submitted is None:  # cancelled before it was submitted
            return -signal.SIGKILL
        if not self.is_cancelled and self.submitted.job_id in self.starter.states:
            return None
        self.submitted.paths.submitted_pickle.unlink(missing_ok=True)
        if not self.submitted.paths.result_pickle.exists():
            return -signal.SIGKILL
        return 1 if self.submitted.exception() else self.submitted.result()

    def wait(self) -> int:
        """Wait for the end of the job, and return its exit code. A cancelled job is left to Slurm."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Cancel the job at the next poll: Slurm sends SIGTERM, and SIGKILL some time later."""
        if self.submitted and not self.is_cancelled and not self.submitted.paths.result_pickle.exists():
            self.starter.to_cancel.append(self.submitted.job_id)
        self.is_cancelled = True


class Work:
    """The function that submitit calls on the node, and again after a job was requeued."""

    def __init__(self, task: Task, environment: dict[str, str]) -> None:
        self.task, self.environment = task | {"sweep": None}, environment  # the job outlives the sweep

    def __call__(self) -> int:
        """Train the run, and return the exit code. If a signal stopped it, exit at once, so that submitit notices."""
        os.environ.update(self.environment)
        code = work(self.task)
        if code not in (0, 1, BUSY):
            raise SystemExit(code)
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return this function as the work of the requeued job, which resumes from the checkpoint of the run."""
        return submitit.helpers.DelayedSubmission(self)

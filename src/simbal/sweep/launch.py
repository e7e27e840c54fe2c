"""Runs what is left of a sweep, and says what that is: what every launcher does."""

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console

from simbal.sweep.attempt import Attempt
from simbal.sweep.job import Job
from simbal.sweep.plan import plan, summary


class Runner(Protocol):
    """A way to run jobs."""

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Run those that are queued to their end, one way or another, and note it in them."""


def launch(
    jobs: Sequence[Job],
    runner: Callable[[Sequence[Attempt]], Runner],
    console: Console,
) -> list[Attempt]:
    """One attempt for each job, in order; jobs that compose to the same run share one.

    Args:
        jobs: all of them composed and checked.
        runner: gives what is to run the attempts that are left; called if there are any, before the data are prepared.
        console: where the sweep is shown.

    Raises:
        UserError: before any job starts, if the data cannot be prepared, or a folder belongs to another config or data.
    """
    planned = plan(jobs, any(job.spec.config["retry_failed"] for job in jobs))
    waiting = [entry.attempt for entry in planned if entry.to_run]
    ready = runner(waiting) if waiting else None
    tokens = _prepare_data(jobs)
    for entry in planned:
        if entry.kind == "finished":
            entry.attempt.folder.require_data(tokens[_data(entry.attempt.job)])
    for note in [entry.note for entry in planned if entry.note]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(planned), highlight=False)
    if ready:
        ready.run(waiting)
    attempts = {entry.attempt.folder.path: entry.attempt for entry in planned}
    return [attempts[job.spec.path] for job in jobs]


def _data(job: Job) -> str:
    return json.dumps(job.spec.config["data"], sort_keys=True)


def _prepare_data(jobs: Sequence[Job]) -> dict[str, str]:
    """Prepare each corpus once, with its progress bar, rather than in every job at once; its token fingerprint."""
    from simbal.data.store import prepare

    configs = {_data(job): job.spec.config["data"] for job in jobs}
    return {key: prepare(config, progress=True).fingerprints["tokens"] for key, config in configs.items()}

"""Runs the jobs of a sweep that are not finished, and says which were: what the `procs` launcher does."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from simbal.sweep.attempt import Attempt
from simbal.sweep.job import Job
from simbal.sweep.pool import Pool
from simbal.sweep.view import View


def launch(
    jobs: Sequence[Job],
    slots: Sequence[dict[str, str]],
    command: Callable[[Job], list[str]],
    console: Console,
) -> list[Attempt]:
    """One attempt for each job, in order; jobs that compose to the same run share one.

    Args:
        jobs: all of them composed and checked.
        slots: the environment of each job that may run at once.
        command: the command line that runs a job alone.
        console: where the sweep is shown.

    Raises:
        UserError: before any job starts, if a folder belongs to another config or the data cannot be prepared.
    """
    attempts: dict[Path, Attempt] = {}
    for job, label in zip(jobs, _labels(jobs), strict=True):
        attempts.setdefault(job.spec.path, Attempt(job, label))
    kinds = Counter(_kind(attempt) for attempt in attempts.values())
    console.print(", ".join(f"{kinds[kind]} {kind}" for kind in ("finished", "resumed", "new")))
    if waiting := [attempt for attempt in attempts.values() if attempt.state == "queued"]:
        _prepare_data([attempt.job for attempt in waiting])
        Pool(slots, command, View(waiting, len(slots), console)).run(waiting)
    return [attempts[job.spec.path] for job in jobs]


def _kind(attempt: Attempt) -> str:
    """Finished, or resumed where a folder was begun, or new; a finished one is taken off the queue."""
    folder, spec = attempt.folder, attempt.job.spec
    begun = (folder.path / "config.yaml").exists()
    if begun:
        folder.write_spec(spec)  # refuses a folder of another config
    if folder.finished(spec):
        attempt.state = "done"
        return "finished"
    return "resumed" if begun else "new"


def _labels(jobs: Sequence[Job]) -> list[str]:
    """Each job's overrides, less those that all have."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set()
    return [" ".join(o for o in job if o not in common) or job.spec.path.name for job in jobs]


def _prepare_data(jobs: Sequence[Job]) -> None:
    """Prepare each corpus once, with its progress bar, rather than in every job at once."""
    from simbal.data.store import prepare

    configs = {json.dumps(job.spec.config["data"], sort_keys=True): job.spec.config["data"] for job in jobs}
    for config in configs.values():
        prepare(config, progress=True)

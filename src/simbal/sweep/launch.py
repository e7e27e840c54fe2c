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
        UserError: before any job starts, if the data cannot be prepared, or a folder belongs to another config or data.
    """
    attempts: dict[Path, Attempt] = {}
    for job, label in zip(jobs, _labels(jobs), strict=True):
        attempts.setdefault(job.spec.path, Attempt(job, label))
    tokens = _prepare_data(jobs)
    kinds = Counter(_kind(attempt, tokens[_data(attempt.job)]) for attempt in attempts.values())
    console.print(", ".join(f"{kinds[kind]} {kind}" for kind in ("finished", "resumed", "new")))
    if waiting := [attempt for attempt in attempts.values() if attempt.state == "queued"]:
        Pool(slots, command, View(waiting, len(slots), console)).run(waiting)
    return [attempts[job.spec.path] for job in jobs]


def _kind(attempt: Attempt, tokens: str) -> str:
    """Finished, or resumed where a folder was begun, or new; a finished one is taken off the queue.

    `tokens` is the fingerprint of the data as they are now.
    """
    folder, spec = attempt.folder, attempt.job.spec
    begun = folder.belongs_to(spec)
    if folder.finished(spec):
        folder.require_data(tokens)
        attempt.state = "done"
        return "finished"
    return "resumed" if begun else "new"


def _labels(jobs: Sequence[Job]) -> list[str]:
    """Each job's overrides, less those that all have."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set()
    return [" ".join(o for o in job if o not in common) or job.spec.path.name for job in jobs]


def _data(job: Job) -> str:
    return json.dumps(job.spec.config["data"], sort_keys=True)


def _prepare_data(jobs: Sequence[Job]) -> dict[str, str]:
    """Prepare each corpus once, with its progress bar, rather than in every job at once; its token fingerprint."""
    from simbal.data.store import prepare

    configs = {_data(job): job.spec.config["data"] for job in jobs}
    return {key: prepare(config, progress=True).fingerprints["tokens"] for key, config in configs.items()}

"""Asks, before anything is trained, whether the runs of a sweep can stand in one table with those in its folder."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from simbal.errors import UserError
from simbal.report.arms import label_columns, label_of, short_label
from simbal.report.collect import Run, collect
from simbal.report.columns import choose
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job

STEPS = "trainer.max_steps"


def require_one_table(jobs: Sequence[Job], tokens: Mapping[Path, str] | None = None) -> None:
    """Raise `UserError` if the runs of a folder would be of different lengths, or on different data.

    Args:
        jobs: of the sweep, composed.
        tokens: the fingerprint of each run's data by its folder, if they are prepared.
    """
    by_folder: dict[Path, list[RunSpec]] = {}
    for job in jobs:
        by_folder.setdefault(job.spec.path.parent, []).append(job.spec)
    for folder, specs in by_folder.items():
        steps = list(dict.fromkeys(spec.config.trainer.max_steps for spec in specs))
        if len(steps) > 1:
            raise UserError(
                f"{' and '.join(f'{STEPS}={count}' for count in steps[:2])} cannot stand in one table: "
                "give each a sweep with a name= of its own"
            )
        data = {tokens[spec.path] for spec in specs} if tokens else set()
        if len(data) > 1:
            raise UserError(
                "runs on different data cannot stand in one table: give each a sweep with a name= of its own"
            )
        other = _other(folder, {spec.path for spec in specs})
        if other is None:
            continue
        before, record = other
        elsewhere = f"they cannot stand in one table: give another name= than {folder.name}"
        if (theirs := before.config.trainer.max_steps) != steps[0]:
            raise UserError(f"{folder} holds runs of {STEPS}={theirs}, and these are of {steps[0]}: {elsewhere}")
        if data and record["data"]["tokens"] not in data:
            raise UserError(f"{folder} holds runs on other data than these: {elsewhere}")


def _other(folder: Path, ours: Collection[Path]) -> tuple[RunSpec, dict[str, Any]] | None:
    """Return a finished run of the folder that is none of the sweep's, with its record; None if there is none.

    One speaks for all: those of a table are alike.
    """
    for file in sorted(folder.glob("*/record.json")):
        run = RunFolder(file.parent)
        record = run.valid_record() if file.parent not in ours else None
        if record is not None and record["status"] == "finished":
            return run.read_spec(), record
    return None


def check_columns(jobs: Iterable[Job]) -> None:
    """Raise `UserError` for a name in `columns` that no number of a run has, nor an analysis in the sweep's folder."""
    for folder, columns in {(job.spec.path.parent, tuple(job.spec.config.columns or ())) for job in jobs}:
        try:
            choose(columns, [])
        except UserError:
            try:
                choose(columns, _finished(folder))
            except UserError as error:
                raise UserError(f"{error}, and numbers of an analysis once evaluate.py has measured them") from None


def no_such_baseline(jobs: Sequence[Job], baseline: str) -> str | None:
    """Return a sentence unless an arm is the baseline, here or among the folder's runs."""
    finished = [run.spec for folder in {job.spec.path.parent for job in jobs} for run in _finished(folder)]
    specs = [*(job.spec for job in jobs), *finished]
    columns = label_columns(specs)
    arms = dict.fromkeys([spec.choices["balancing"] for spec in specs])
    arms |= dict.fromkeys([short_label(label_of(spec, columns)) for spec in specs])
    if baseline in arms:
        return None
    return f"baseline={baseline}: no arm is that; there is {', '.join(get_close_matches(baseline, arms, 3, 0))}"


def _finished(folder: Path) -> list[Run]:
    """Return the finished runs of a folder; none if it holds no runs."""
    if not any(folder.glob("*/config.yaml")):
        return []
    return [run for run in collect(folder) if run.finished]

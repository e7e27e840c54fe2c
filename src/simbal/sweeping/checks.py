"""Checks before the first job of a sweep starts: data, models, GPUs and whether all runs fit into one table."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from hydra.plugins.launcher import Launcher

from simbal.errors import UserError
from simbal.report.arms import group_runs, label_columns
from simbal.report.collect import Run, collect
from simbal.report.columns import choose_columns
from simbal.runs.folder import RunFolder, runs_in
from simbal.runs.spec import RunSpec
from simbal.sweeping.composer import Job
from simbal.sweeping.plan import plan

STEPS = "trainer.max_steps"


def prepare_launch(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Prepare the data of all jobs, and check that they can start.

    Raises:
        UserError: a GPU or node is missing, the data cannot be prepared, a folder belongs to another config, or the
            runs do not fit into one table with those in their folder.
    """
    if slots := getattr(launcher, "slots", None):  # launchers of other packages have no slots
        slots(jobs)
    tokens = _prepare_data(jobs)
    for attempt in plan(jobs, retry_failed=False):
        if attempt.kind == "finished":
            attempt.folder.require_same_data(attempt.tokens, tokens[attempt.folder.path])
    check_one_table(jobs, tokens)


def check_all_buildable(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Raise `UserError` for errors that a run would raise at its start, such as a missing file or backend.

    Jobs that differ only in their seed or learning rate are checked once.
    """
    from simbal.data.prepare import open_source
    from simbal.training.build import check_buildable  # imports torch

    for job in {_data_key(job): job for job in jobs}.values():
        open_source(job.spec.config.data).identity()
    parts = {"model", "router", "balancing", "experts", "trainer"}
    for job in {job.spec.config.model_dump_json(include=parts): job for job in jobs}.values():
        check_buildable(job.spec, here=getattr(launcher, "here", True))


def check_strategies(jobs: Sequence[Job]) -> None:
    """Raise `UserError` for a value that a strategy rejects. Jobs with the same strategies are checked once."""
    from simbal.training.build import build_strategies, transformer_shape  # imports torch

    for job in {json.dumps(job.spec.written["balancing"]): job for job in jobs}.values():
        build_strategies(job.spec, transformer_shape(job.spec, end_of_text=0))


def check_one_table(jobs: Sequence[Job], tokens: Mapping[Path, str] | None = None) -> None:
    """Raise `UserError` if the runs of a folder have different lengths or different data.

    Args:
        jobs: the jobs of the sweep.
        tokens: the fingerprint of the prepared data for each run folder; None skips the check of the data.
    """
    by_folder: dict[Path, list[RunSpec]] = defaultdict(list)
    for job in jobs:
        by_folder[job.spec.path.parent].append(job.spec)
    for folder, specs in by_folder.items():
        steps = [*dict.fromkeys(spec.config.trainer.max_steps for spec in specs)]
        data = {tokens[spec.path] for spec in specs} if tokens else set()
        remedy = "choose a different name= for each"
        if len(steps) > 1:
            raise UserError(f"runs of {STEPS}={steps[0]} and {STEPS}={steps[1]} cannot share a table: {remedy}")
        if len(data) > 1:
            raise UserError(f"runs on different data cannot share a table: {remedy}")
        ours = {spec.path for spec in specs}
        for file in sorted(folder.glob("*/record.json")):
            other = RunFolder(file.parent)
            record = None if other.path in ours else other.valid_record()
            if record is None or record["status"] != "finished":
                continue
            remedy = f"these runs cannot share its table: choose a different name= than {folder.name}"
            if (theirs := other.read_spec().config.trainer.max_steps) != steps[0]:
                raise UserError(f"{folder} contains runs of {STEPS}={theirs}, not {steps[0]}; {remedy}")
            if data and record["data"]["tokens"] not in data:
                raise UserError(f"{folder} contains runs on other data; {remedy}")
            break  # finished runs of a folder have passed this check, so one is enough


def check_columns(jobs: Iterable[Job]) -> None:
    """Raise `UserError` for a name in `columns` that neither the runs nor their analyses measure."""
    for folder, columns in {(job.spec.path.parent, tuple(job.spec.config.columns or ())) for job in jobs}:
        with suppress(UserError):
            choose_columns(columns, [])
            continue
        try:
            choose_columns(columns, finished_runs(folder))
        except UserError as error:
            raise UserError(f"{error}; columns of an analysis exist once evaluate.py has measured them") from None


def check_baseline(jobs: Sequence[Job]) -> None:
    """Raise `UserError` if neither a job nor a finished run of its folder is the baseline."""
    baseline = jobs[0].spec.config.baseline
    finished = [run for folder in {job.spec.path.parent for job in jobs} for run in finished_runs(folder)]
    runs = [*(Run(job.spec.path, {}, job.spec, None) for job in jobs), *finished]
    arms = group_runs(runs, label_columns([run.spec for run in runs]))
    if not any(arm.is_baseline(baseline) for arm in arms):
        closest = ", ".join(get_close_matches(baseline, [arm.name for arm in arms], 3, 0))
        raise UserError(f"baseline={baseline} is not an arm of this sweep; the closest are {closest}")


def finished_runs(folder: Path) -> list[Run]:
    """Return the finished runs in outputs/<name>, which may be missing or empty."""
    return [run for run in collect(folder) if run.finished] if runs_in(folder) else []


def _data_key(job: Job) -> str:
    """Return as JSON the keys that determine the corpus and its split. The seed affects only the order of batches."""
    return json.dumps(job.spec.config.data.model_dump(exclude={"seed"}), sort_keys=True)


def _prepare_data(jobs: Sequence[Job]) -> dict[Path, str]:
    """Prepare each corpus once, and return the fingerprint of the tokens for each run folder."""
    from simbal.data.prepare import prepare

    tokens = {}
    for key, job in {_data_key(job): job for job in jobs}.items():
        tokens[key] = prepare(job.spec.config.data, progress=True).fingerprints["tokens"]
    return {job.spec.path: tokens[_data_key(job)] for job in jobs}

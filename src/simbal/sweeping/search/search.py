"""Run a search: ask Optuna for trials, launch their jobs, prune unpromising trials and store the results.

The process of the sweep reads the curves of running jobs and prunes them. Jobs need no access to the study, so any
launcher works.
"""

import csv
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from json import JSONDecodeError
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from hydra.plugins.launcher import Launcher
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from simbal.config.schema import Config, can_change_result
from simbal.console import new_grid
from simbal.errors import UserError
from simbal.report.arms import label_columns, short_columns
from simbal.report.report import report
from simbal.runs.atomic import write_json, write_text
from simbal.runs.curves import rows
from simbal.runs.folder import PRUNE_FILE, RECORD_FILE, RunFolder, runs_in
from simbal.runs.record import error_of, is_number
from simbal.runs.spec import RunSpec, result_keys
from simbal.sweeping.checks import check_all_buildable, check_columns, check_one_table, prepare_launch
from simbal.sweeping.composer import Job
from simbal.sweeping.plan import assign_folders, write_sweep_json
from simbal.sweeping.search.space import SearchSettings, SearchSpace

UNNAMED = "default"  # the study of a sweep without name= is kept in memory
POLL_SECONDS = 0.5
# user attributes of a trial
RUNS, REPLICATES = "runs", "replicates"  # its run folders, and the objectives of each run
ERROR = "error"  # why it failed or was pruned
RETRY_OF = "retry_of"  # the number of the interrupted or failed trial that it repeats
SEARCHED = "searched"  # user attribute of a study: its search space and fixed settings
FIXED = "fixed_params"  # Optuna's system attribute: the parameters of a queued trial
Compose = Callable[[list[str]], Job]


def run_searches(
    spaces: dict[str, SearchSpace], settings: SearchSettings, compose: Compose, launcher: Launcher, out: Console
) -> None:
    """Run the missing trials of all arms, then print their trials and the table of all runs.

    All studies are checked and opened before the first job starts.

    Args:
        spaces: the search space of each arm; a single arm may have the name "".
        settings: checked settings.
        compose: composes and checks a job.
        launcher: runs jobs.
        out: where to print.

    Raises:
        UserError: the search cannot start, or too many trials failed.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    searches = [Search(arm, space, settings, compose, launcher) for arm, space in spaces.items()]
    jobs = [job for search in searches for job in search.probe_jobs]
    folder, config = jobs[0].spec.path.parent, jobs[0].spec.config
    check_one_table(jobs)
    check_columns(jobs)
    if config.dry_run:
        check_all_buildable(jobs, launcher)
        for search in searches:
            out.print(f"dry run: study {search.name}, {settings.n_trials} trials in total", soft_wrap=True)
        return
    in_memory = config.name == UNNAMED and settings.study_name is None
    with RunFolder(folder).lock(), storage_errors():
        storage = open_storage(settings.storage or ("memory" if in_memory else f"sqlite:///{folder / 'study.db'}"))
        for search in searches:
            search.open(storage)
        if any(search.num_missing() for search in searches):
            prepare_launch(jobs, launcher)
        write_sweep_json(folder)
        try:
            for search in searches:
                missing = f", {search.num_missing()} to run" if search.num_missing() else ""
                done = f"{search.num_done()} of {settings.n_trials} trials done{missing}"
                out.print(f"study {search.name}: {done}", soft_wrap=True)
                search.run(lambda: write_trials(searches, folder), out)
        finally:
            write_trials(searches, folder)
            for search in searches:
                print_trials(search, out)
            out.print(f"written: {folder / 'trials.csv'}", soft_wrap=True)
    if runs_in(folder):
        keys = {"baseline": config.baseline, "columns": config.columns}
        report(folder, **keys, equivalence_margin=config.equivalence_margin, save=True)


@dataclass
class ActiveTrial:
    """A trial and its jobs. The curve of the first job decides whether all of them are pruned."""

    trial: optuna.Trial
    jobs: list[Job]
    step: int = 0  # the last step that was reported to Optuna
    reason: str = ""  # why the trial is pruned

    def report_curve(self, objective: str) -> None:
        """Report new values to Optuna, and ask all jobs to stop if its pruner decides so."""
        for row in rows(self.jobs[0].spec.path, skip_damaged=True):
            if not self.reason and row["step"] > self.step and is_number(row.get(objective)):
                self.step, value = row["step"], row[objective]
                self.trial.report(value, self.step)
                if self.trial.should_prune():
                    number = self.trial.number
                    self.reason = f"pruned by trial {number}: {objective} was {value:.6g} at step {self.step}"
        for path in (job.spec.path for job in self.jobs) if self.reason else ():
            # a job that starts later removes the file, so it is written again
            if path.is_dir() and not (path / PRUNE_FILE).exists() and not (path / RECORD_FILE).exists():
                write_json(path / PRUNE_FILE, {"reason": self.reason})


class Search:
    """The search of one arm, with its own Optuna study.

    Each trial has a new sampler, seeded by the number of points sampled before. A resumed search therefore samples the
    same points as an uninterrupted one.
    """

    study: optuna.Study

    def __init__(
        self, arm: str, space: SearchSpace, settings: SearchSettings, compose: Compose, launcher: Launcher
    ) -> None:
        """Compose jobs that cover all choices and ends of intervals; `ConfigError` if one is invalid."""
        self.space, self.settings, self.compose, self.launcher = space, settings, compose, launcher
        self.probe_jobs = [compose(lines) for point in space.probes() for lines in space.jobs(point)]
        self.columns = label_columns([job.spec for job in self.probe_jobs])
        self.name = "/".join(filter(None, [settings.study_name or self.probe_jobs[0].spec.config.name, arm]))
        self.num_ended = self.num_failed = 0  # trials of this command
        self.last_error = ""

    def open(self, storage: BaseStorage) -> None:
        """Load or create the study and queue interrupted trials; `UserError` if its settings differ."""
        config = self.probe_jobs[0].spec.config
        self.study = optuna.create_study(
            storage=storage,
            study_name=self.name,
            directions=self.settings.directions,  # type: ignore[arg-type]  # `SearchSettings.check` checks them
            load_if_exists=True,
            pruner=make_pruner(self.settings, config),
        )
        now = {
            "directions": ",".join(self.settings.directions),
            "objectives": ",".join(self.settings.objectives),
            "replicates": ", ".join(" ".join(lines) for lines in self.space.replicates),
            **self._shared_config(),
            **{key: str(distribution) for key, distribution in self.space.distributions.items()},
        }
        before = self.study.user_attrs.get(SEARCHED, now)
        if before != now:
            changed = [key for key in before | now if before.get(key) != now.get(key)]
            values = "; ".join(f"{key}={before.get(key, 'unset')} (now {now.get(key, 'unset')})" for key in changed)
            raise UserError(
                f"the study {self.name} was started with {values}; "
                "rerun the command that started it, or choose another hydra.sweeper.study_name"
            )
        self.study.set_user_attr(SEARCHED, now)
        if self.num_missing():
            self._queue_trials(config.retry_failed)

    def num_done(self) -> int:
        """Return the number of completed and pruned trials, including trials of earlier commands."""
        return len(self._trials(TrialState.COMPLETE, TrialState.PRUNED))

    def num_missing(self) -> int:
        """Return the number of trials still to run."""
        return max(0, self.settings.n_trials - self.num_done())

    def run(self, after_batch: Callable[[], None], out: Console) -> None:
        """Run the missing trials, batch by batch; `UserError` if too many fail."""
        at_once, num_replicates = self.settings.n_jobs, len(self.space.replicates)
        if at_once is None:
            slots = getattr(self.launcher, "slots", None)  # launchers of other packages have no slots
            at_once = math.ceil((len(slots(self.probe_jobs[:num_replicates])) if slots else 2) / num_replicates)
        while batch := self._ask(min(at_once, self.num_missing())):
            for active in batch:
                out.print(f"trial {active.trial.number}: {_format_params(active.trial.params)}", soft_wrap=True)
            jobs = [job for active in batch for job in active.jobs]
            with prune_while_running(batch, self.settings):
                self.launcher.launch(jobs, initial_job_idx=self.num_ended * num_replicates)
            for active in batch:
                self._store_result(active)
            after_batch()
            self._check_failure_rate()

    def _queue_trials(self, retry_failed: bool) -> None:
        """Queue the trials that an interrupted search left running and, with `retry_failed`, the failed trials."""
        repeated = {trial.user_attrs.get(RETRY_OF) for trial in self._trials()}
        failed = self._trials(TrialState.FAIL) if retry_failed else []
        for trial in [*failed, *self._trials(TrialState.RUNNING)]:
            # queue first: a kill between the two steps then loses nothing
            if trial.number not in repeated and self._is_sampled(trial):
                self.study.enqueue_trial(_params(trial), user_attrs={RETRY_OF: trial.number})
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)

    def _ask(self, count: int) -> list[ActiveTrial]:
        """Return `count` trials, queued ones first."""
        batch: list[ActiveTrial] = []
        for _ in range(count):
            num_sampled = sum(RETRY_OF not in trial.user_attrs and self._is_sampled(trial) for trial in self._trials())
            # with the sum as seed, the second point of sampler_seed=0 would be the first point of sampler_seed=1
            seed = random.Random(f"{self.settings.sampler_seed} {num_sampled}").getrandbits(32)
            sampler = optuna.samplers.TPESampler if self.settings.sampler == "tpe" else optuna.samplers.RandomSampler
            self.study.sampler = sampler(seed=seed)
            trial = self.study.ask(fixed_distributions=dict(self.space.distributions))
            try:
                jobs = assign_folders([*map(self.compose, self.space.jobs(trial.params))], self.columns)
            except UserError as error:
                self._fail(trial, str(error))
                raise
            trial.set_user_attr(RUNS, [str(job.spec.path) for job in jobs])
            batch.append(ActiveTrial(trial, [*jobs]))
        return batch

    def _store_result(self, active: ActiveTrial) -> None:
        self.num_ended += 1
        rows: list[list[float]] = []
        for job, replicate in zip(active.jobs, self.space.replicates, strict=True):
            status, row, error = read_result(job.spec, self.settings.objectives)
            if status == "pruned":
                active.trial.set_user_attr(ERROR, active.reason or "pruned")
                self.study.tell(active.trial, state=TrialState.PRUNED)
                return
            if error:
                self._fail(active.trial, " ".join([*replicate, error]))
                return
            rows.append(row)
        active.trial.set_user_attr(REPLICATES, rows)
        self.study.tell(active.trial, [fmean(column) for column in zip(*rows, strict=True)])

    def _fail(self, trial: optuna.Trial, error: str) -> None:
        self.num_failed += 1
        self.last_error = error
        trial.set_user_attr(ERROR, error)
        self.study.tell(trial, state=TrialState.FAIL)

    def _check_failure_rate(self) -> None:
        rate, total = self.settings.max_failure_rate, self.settings.n_trials
        if self.num_failed > rate * total:
            raise UserError(
                f"{self.num_failed} of {self.num_ended} trials of the study {self.name} failed, more than "
                f"hydra.sweeper.max_failure_rate={rate:g} of {total} allows; the last error: {self.last_error}"
            )

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _is_sampled(self, trial: FrozenTrial) -> bool:
        """Return whether all parameters of a trial were sampled before the search was killed."""
        return _params(trial).keys() >= self.space.distributions.keys()

    def _shared_config(self) -> dict[str, str]:
        """Return the options and values that are neither searched nor replicated, as JSON by key."""
        varied = {key.lstrip("+") for key in self.space.distributions}
        if any(self.space.replicates) and self.settings.replicates:
            varied.add(self.settings.replicates)
        spec = self.probe_jobs[0].spec
        values = {group: option for group, option in spec.choices.items() if can_change_result(group)}
        values |= result_keys(spec.written)
        return {key: json.dumps(value) for key, value in values.items() if key not in varied}


def read_result(spec: RunSpec, objectives: Sequence[str]) -> tuple[str, list[float], str]:
    """Return the status of a run, its value of each objective, and the reason if it has none."""
    record = RunFolder(spec.path).valid_record()
    if record is None or record["config_hash"] != spec.hash:
        return "", [], f"{spec.path} has no result"
    if record["status"] != "finished":
        return record["status"], [], error_of(record) or record["status"]
    metrics = {**record["metrics"], "tokens_per_second": record["tokens_per_second"]}
    for objective in objectives:
        if metrics.get(objective) is None:
            return "finished", [], f"{spec.path} did not measure {objective}; it has {', '.join(metrics)}"
    return "finished", [float(metrics[objective]) for objective in objectives], ""


@contextmanager
def prune_while_running(batch: Sequence[ActiveTrial], settings: SearchSettings) -> Iterator[None]:
    """Report the curves of a batch to the pruner from a thread within the block, and raise the thread's errors."""
    if settings.pruner == "none":
        yield
        return
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(POLL_SECONDS):
            for active in batch:
                active.report_curve(settings.objectives[0])

    with ThreadPoolExecutor(1) as threads:
        polling = threads.submit(poll)
        try:
            yield
        finally:
            is_over.set()
    for job in (job for active in batch for job in active.jobs):
        (job.spec.path / PRUNE_FILE).unlink(missing_ok=True)
    polling.result()


def make_pruner(settings: SearchSettings, config: Config) -> optuna.pruners.BasePruner:
    """Return the pruner that `hydra.sweeper.pruner` names."""
    last = config.trainer.max_steps
    first = min(config.trainer.val_every, last)  # earlier validations say little about the final loss
    if settings.pruner == "median":
        return optuna.pruners.MedianPruner(settings.pruner_startup_trials, n_warmup_steps=first)
    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=first, max_resource=last)
    if settings.pruner == "successive_halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first)
    return optuna.pruners.NopPruner()


def open_storage(setting: str) -> BaseStorage:
    """Open the storage that `hydra.sweeper.storage` names; `UserError` if it is invalid. Passwords are not shown."""
    if setting == "memory":
        return InMemoryStorage()
    if setting.startswith("journal:"):
        try:
            return JournalStorage(JournalFileBackend(setting.removeprefix("journal:")))
        except OSError as error:
            raise UserError(f"cannot use hydra.sweeper.storage={setting}: {error.strerror}") from None
    try:
        return RDBStorage(setting)
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        forms = "memory, journal:FILE, sqlite:///FILE or the URL of another database"
        raise UserError(f"hydra.sweeper.storage must be {forms}") from None
    except ImportError as error:
        raise UserError(f"cannot use hydra.sweeper.storage: {error}") from None


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn errors of the storage within the block into a `UserError`."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, JSONDecodeError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = " ".join(str(getattr(cause, "orig", None) or cause).split())
        raise UserError(f"cannot use hydra.sweeper.storage: {reason}") from None


def _params(trial: FrozenTrial) -> dict[str, Any]:
    return {**trial.system_attrs.get(FIXED, {}), **trial.params}


def print_trials(search: Search, out: Console) -> None:
    """Print a table of all trials of a study, and the best one."""
    study, objectives, keys = search.study, search.settings.objectives, [*search.space.distributions]
    out.print(f"study {search.name}", style="bold", soft_wrap=True)
    grid = new_grid("")
    for heading in ("trial", "state", *objectives, *short_columns(keys), "runs", "error"):
        grid.add_column(heading, overflow="fold")
    for trial in study.trials:
        row = _row(search, trial)
        cells = (row.get(key, "") for key in ("trial", "state", *objectives, *keys, "replicates", "error"))
        grid.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    out.print(grid)
    num_complete = sum(trial.state == TrialState.COMPLETE for trial in study.trials)
    if not num_complete:
        out.print("no trial is complete")
    elif len(objectives) > 1:
        out.print(f"Pareto front of {', '.join(objectives)}:")
        for trial in study.best_trials:
            out.print(f"  {_describe(trial, objectives)}", soft_wrap=True)
    else:
        out.print(f"best: {_describe(study.best_trial, objectives)}", soft_wrap=True)
        if num_complete > 1:
            out.print(
                f"The value of the best of {num_complete} trials is biased, because the same runs selected it. "
                "Evaluate it again on other seeds.",
                soft_wrap=True,
            )


def write_trials(searches: Sequence[Search], folder: Path) -> None:
    """Write trials.csv: one line per trial, with numbers in full precision and the folders of its runs."""
    keys = dict.fromkeys(key for search in searches for key in search.space.distributions)
    columns = ["study", "trial", "state", *searches[0].settings.objectives, *keys, "replicates", "error", "runs"]
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for search in searches:
        writer.writerows(_row(search, trial) for trial in search.study.trials)
    write_text(folder / "trials.csv", text.getvalue())


def _format_params(params: dict[str, Any]) -> str:
    """Return parameters as they are given on the command line."""
    return " ".join(f"{key}={value}" for key, value in params.items())


def _row(search: Search, trial: FrozenTrial) -> dict[str, Any]:
    attrs, state = trial.user_attrs, trial.state.name.lower()
    if trial.state == TrialState.FAIL:
        state = "failed" if ERROR in attrs else "interrupted"
    # Optuna sets the value of a pruned trial to its last report
    values = trial.values if trial.state == TrialState.COMPLETE else ()
    return {
        "study": search.name, "trial": trial.number, "state": state,
        **dict(zip(search.settings.objectives, values, strict=False)), **trial.params,
        "replicates": len(attrs.get(REPLICATES, ())), "error": attrs.get(ERROR, ""),
        "runs": " ".join(attrs.get(RUNS, ())),
    }  # fmt: skip


def _describe(trial: FrozenTrial, objectives: Sequence[str]) -> str:
    values = " ".join(f"{objective} {value:.4g}" for objective, value in zip(objectives, trial.values, strict=True))
    n = len(trial.user_attrs[REPLICATES])
    source = f"mean of {n} runs" if n > 1 else "one run"
    return f"trial {trial.number}, {values} ({source}): {_format_params(trial.params)}"

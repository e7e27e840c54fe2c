"""A study of Optuna and its storage: which points were tried, their results, and which point is next.

`n_trials` counts all trials of the study, so that the same command given again runs what is missing.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from simbal.errors import UserError
from simbal.sweep.search.settings import TRIALS, SearchSettings
from simbal.sweep.search.space import SearchSpace

# user attributes of a trial
RUNS, REPLICATES = "runs", "replicates"  # the run folders, and the values of each
ERROR = "error"  # why it failed or was pruned
RETRY_OF = "retry_of"  # the number of the trial whose parameters this one has
SEARCHED = "searched"  # the study's user attribute: what it searches
FIXED = "fixed_params"  # Optuna's system attribute: the parameters with which a trial was queued


class OptunaStudy:
    """A study: one search space, its trials so far, and a sampler.

    Every trial has a new sampler, seeded by the number of points drawn before it: a resumed search draws the same
    points as an uninterrupted one, and repeats none.
    """

    inner: optuna.Study

    def __init__(self, name: str, space: SearchSpace, settings: SearchSettings, config: dict[str, str]) -> None:
        """Set what is searched and how.

        Args:
            name: of the study in its storage.
            space: what is searched.
            settings: how.
            config: the options and keys that all of its runs have, as texts.
        """
        self.name, self.space, self.settings, self.config = name, space, settings, config
        self.is_grid = settings.sampler == "grid"

    def open(self, storage: BaseStorage) -> None:
        """Load the study from its storage, or create it there; `UserError` if it was started with other settings."""
        self.inner = optuna.create_study(
            storage=storage,
            study_name=self.name,
            directions=[StudyDirection[direction.upper()] for direction in self.settings.directions],
            load_if_exists=True,
        )
        now = {
            "directions": ",".join(self.settings.directions),
            "objectives": ",".join(self.settings.objectives),
            "replicates": ", ".join(" ".join(lines) for lines in self.space.replicates),
            **self.config,
            **{key: str(distribution) for key, distribution in self.space.distributions.items()},
        }
        before = self.inner.user_attrs.get(SEARCHED)
        if before is None:
            self.inner.set_user_attr(SEARCHED, now)
        elif before != now:
            changed = [key for key in before | now if before.get(key) != now.get(key)]
            values = "; ".join(f"{key}={before.get(key, 'nothing')} (now {now.get(key, 'nothing')})" for key in changed)
            raise UserError(
                f"the study {self.name} was started with {values}; "
                "rerun the command that started it, or choose another hydra.sweeper.study_name"
            )

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in one of `states`, or all."""
        return self.inner.get_trials(deepcopy=False, states=states or None)

    @property
    def n_trials(self) -> int:
        """The total number of trials."""
        if not self.is_grid:
            return self.settings.n_trials or TRIALS
        points = sum(1 for _ in self.space.grid())
        return min(points, self.settings.n_trials or points)

    def requeue(self, retry_failed: bool) -> None:
        """Queue the trials that a killed search left running, and every point of a grid; failed ones if asked to."""
        if not self.is_grid and not self.missing():
            return
        for trial in [*(self.failed() if retry_failed else ()), *self.trials(TrialState.RUNNING)]:
            self._queue_again(trial)
        for point in self.space.grid() if self.is_grid else ():
            self.inner.enqueue_trial(point, skip_if_exists=True)

    def failed(self) -> list[FrozenTrial]:
        """Return the failed trials that were not queued again."""
        again = {trial.user_attrs.get(RETRY_OF) for trial in self.trials()}
        return [t for t in self.trials(TrialState.FAIL) if t.number not in again and self._has_point(t)]

    def done(self) -> int:
        """Return the number of trials with a value or pruned; failed points of a grid count, as none replaces them."""
        done = self.trials(TrialState.COMPLETE, TrialState.PRUNED)
        return len(done) + (len(self.failed()) if self.is_grid else 0)

    def missing(self) -> int:
        """Return the number of trials still to run."""
        return max(0, self.n_trials - self.done())

    def ask(self) -> optuna.Trial | None:
        """Return the next trial: a queued one, or a new point; None after the last point of a grid."""
        if self.is_grid and not self.trials(TrialState.WAITING):
            return None
        drawn = sum(RETRY_OF not in trial.user_attrs and self._has_point(trial) for trial in self.trials())
        # the plain sum would make the second point of sampler_seed=0 the first of sampler_seed=1
        seed = random.Random(f"{self.settings.sampler_seed} {drawn}").getrandbits(32)
        sampler = optuna.samplers.TPESampler if self.settings.sampler == "tpe" else optuna.samplers.RandomSampler
        self.inner.sampler = sampler(seed=seed)
        return self.inner.ask(fixed_distributions=dict(self.space.distributions))

    def fail(self, trial: optuna.Trial, error: str) -> None:
        """Mark a trial as failed, with the reason."""
        trial.set_user_attr(ERROR, error)
        self.inner.tell(trial, state=TrialState.FAIL)

    def _queue_again(self, trial: FrozenTrial) -> None:
        """Queue a trial's point again, then end the trial: a kill between the two loses nothing."""
        queued = {waiting.user_attrs.get(RETRY_OF) for waiting in self.trials(TrialState.WAITING)}
        if trial.number not in queued and self._has_point(trial):
            self.inner.enqueue_trial(_point(trial), user_attrs={RETRY_OF: trial.number})
        if trial.state == TrialState.RUNNING:
            self.inner.tell(trial.number, state=TrialState.FAIL)

    def _has_point(self, trial: FrozenTrial) -> bool:
        """Whether all parameters of a trial are known: a kill may have stopped the drawing of a point."""
        return _point(trial).keys() >= self.space.distributions.keys()


def _point(trial: FrozenTrial) -> dict[str, Any]:
    return {**trial.system_attrs.get(FIXED, {}), **trial.params}


def open_storage(setting: str) -> BaseStorage:
    """Open the storage that `hydra.sweeper.storage` names."""
    if setting == "memory":
        return InMemoryStorage()
    if setting.startswith("journal:"):
        return JournalStorage(JournalFileBackend(setting.removeprefix("journal:")))
    return RDBStorage(setting)


def format_storage(setting: str) -> str:
    """Return the storage's name without its password; `UserError` if it is not a storage."""
    if setting == "memory" or setting.startswith("journal:"):
        return setting
    try:
        return make_url(setting).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        forms = "memory, journal:FILE, sqlite:///FILE or the URL of another database"
        raise UserError(f"hydra.sweeper.storage is not one of {forms}") from None


@contextmanager
def storage_errors(storage: str) -> Iterator[None]:
    """Raise errors of the storage within the block as a `UserError`."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, JSONDecodeError, ImportError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = " ".join(str(getattr(cause, "orig", None) or cause).split())
        raise UserError(f"cannot use the study's storage {storage}: {reason}") from None

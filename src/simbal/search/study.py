"""A study of Optuna: which points were tried, what came of them, and which is next.

`n_trials` counts all of its trials, so that the same command given again does what is missing.
"""

import os
import socket
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from simbal.errors import UserError
from simbal.search.samplers import make_sampler
from simbal.search.settings import TRIALS, SearchSettings
from simbal.search.space import SearchSpace

RETRY_OF = "retry_of"  # user attribute: the number of the trial whose parameters this one has
HOST, PID = "host", "pid"  # user attributes: who runs the trial
ERROR = "error"
VALUES = (TrialState.COMPLETE, TrialState.PRUNED)


class Study:
    """One search space, its trials so far, and a sampler.

    Every trial asked for has a sampler of its own, seeded by the number of points drawn before it: a resumed search
    goes on with the points that it would have had, and repeats none.
    """

    inner: optuna.Study

    def __init__(self, name: str, space: SearchSpace, settings: SearchSettings, shared: bool) -> None:
        """`shared`: whether other machines may work on it at the same time."""
        self.name, self.space, self.settings, self.shared = name, space, settings, shared

    def open(self, storage: BaseStorage, fixed: Sequence[str]) -> None:
        """Load the study, or begin it.

        Args:
            storage: where it is kept.
            fixed: overrides of its jobs that change their results.

        Raises:
            UserError: if there is one of this name that searches something else.
        """
        self.inner = optuna.create_study(
            storage=storage,
            study_name=self.name,
            directions=[StudyDirection[direction.upper()] for direction in self.settings.directions],
            load_if_exists=True,
        )
        asked = {
            "directions": {"directions": ",".join(self.settings.directions)},
            "objectives": {"objectives": ",".join(self.settings.objectives)},
            "space": self.space.describe(),
            "replicates": {"replicates": ", ".join(" ".join(lines) for lines in self.space.replicates)},
            "fixed": dict.fromkeys(sorted(fixed), ""),
        }
        kept = dict(self.inner.user_attrs)
        kept["directions"] = {"directions": ",".join(d.name.lower() for d in self.inner.directions)}
        if "space" not in kept and self.trials():
            raise UserError(f"the study {self.name} was not made by simbal: choose another hydra.sweeper.study_name")
        for part, value in asked.items():
            if part in kept and kept[part] != value:
                raise UserError(
                    f"the study {self.name} has other {_PARTS[part]}: {_differences(kept[part], value)}; "
                    "give the command that began it, or choose another hydra.sweeper.study_name"
                )
            if part not in kept:
                self.inner.set_user_attr(part, value)

    def look(self, storage: BaseStorage) -> int:
        """How many trials of the study count by now; 0 if there is none."""
        try:
            self.inner = optuna.load_study(storage=storage, study_name=self.name)
        except KeyError:
            return 0
        return self.done()

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Those in one of `states`, or all."""
        return self.inner.get_trials(deepcopy=False, states=states or None)

    @property
    def n_trials(self) -> int:
        """How many there are to be in all."""
        if self.settings.sampler != "grid":
            return self.settings.n_trials or TRIALS
        points = sum(1 for _ in self.space.grid())
        return min(points, self.settings.n_trials or points)

    def prepare(self, retry_failed: bool, pruner: optuna.pruners.BasePruner) -> None:
        """Queue again, with the same parameters, what a sweep that was killed left running; and the points of a grid.

        With `retry_failed` also what has failed.
        """
        self.inner.pruner = pruner
        grid = self.settings.sampler == "grid"
        if retry_failed and (grid or self.missing()):
            for trial in self.failed():
                self._queue_again(trial)
        if self.missing() == 0:
            return
        for trial in self.trials(TrialState.RUNNING):
            if not self._is_elsewhere(trial):
                self._queue_again(trial)
        if grid:
            for point in self.space.grid():
                self.inner.enqueue_trial(point, skip_if_exists=True)

    def elsewhere(self) -> list[FrozenTrial]:
        """Trials that other machines run, or ran when they stopped."""
        return [trial for trial in self.trials(TrialState.RUNNING) if self._is_elsewhere(trial)]

    def failed(self) -> list[FrozenTrial]:
        """Failed trials that were not queued again."""
        again = {trial.user_attrs.get(RETRY_OF) for trial in self.trials()}
        return [trial for trial in self.trials(TrialState.FAIL) if trial.number not in again]

    def done(self) -> int:
        """Trials that count: with a value or pruned; of a grid also failed ones, which nothing can replace."""
        return len(self.trials(*VALUES)) + (len(self.failed()) if self.settings.sampler == "grid" else 0)

    def missing(self) -> int:
        """How many there are still to run here."""
        return max(0, self.n_trials - self.done() - len(self.elsewhere()))

    def ask(self) -> optuna.Trial | None:
        """The next trial: one that is queued, or a new point; None if a grid has no more."""
        trials = self.trials()
        if self.settings.sampler == "grid" and not self.trials(TrialState.WAITING):
            return None
        drawn = sum(RETRY_OF not in trial.user_attrs for trial in trials)
        self.inner.sampler = make_sampler(self.settings, drawn)
        trial = self.inner.ask(fixed_distributions=dict(self.space.distributions))
        trial.set_user_attr(HOST, socket.gethostname())
        trial.set_user_attr(PID, os.getpid())
        return trial

    def fail(self, trial: optuna.Trial, error: str) -> None:
        """The trial has no value, and this is why."""
        trial.set_user_attr(ERROR, error)
        self.inner.tell(trial, state=TrialState.FAIL)

    def _is_elsewhere(self, trial: FrozenTrial) -> bool:
        """This machine's are not: the lock says that nobody here runs them."""
        return self.shared and not self.settings.take_over and trial.user_attrs.get(HOST) != socket.gethostname()

    def _queue_again(self, trial: FrozenTrial) -> None:
        """First the new one, then the end of the old: a kill between the two loses nothing."""
        queued = {waiting.user_attrs.get(RETRY_OF) for waiting in self.trials(TrialState.WAITING)}
        if trial.number not in queued:
            self.inner.enqueue_trial(trial.params, user_attrs={RETRY_OF: trial.number})
        if trial.state == TrialState.RUNNING:
            self.inner.tell(trial.number, state=TrialState.FAIL)


_PARTS = {
    "directions": "directions",
    "objectives": "objectives",
    "space": "search space",
    "replicates": "replicates",
    "fixed": "overrides",
}


def _differences(kept: dict[str, str], asked: dict[str, str]) -> str:
    """`coef=interval(0,1), not interval(0,2)` for each key, and lines that only one of the two has."""
    said = []
    for key in kept | asked:
        before, now = kept.get(key), asked.get(key)
        if before != now:
            names = [f"{key}={value}" if value else key for value in (before, now) if value is not None]
            alone = "is missing" if now is None else "is new"
            said.append(", not ".join(names) if len(names) == 2 else f"{names[0]} {alone}")
    return "; ".join(said)


def shown(params: dict[str, Any]) -> str:
    """Parameters as they are given on the command line."""
    return " ".join(f"{key}={value}" for key, value in params.items())

"""A study of Optuna: which points were tried, their results, and which is next.

`n_trials` counts all of its trials, so that the same command given again does what is missing.
"""

import random
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from simbal.errors import UserError
from simbal.sweep.search.settings import TRIALS, SearchSettings
from simbal.sweep.search.space import SearchSpace

# user attributes of a trial
RUNS, REPLICATES = "runs", "replicates"  # the run folders, and the values of each
ERROR = "error"  # why it failed or was pruned
RETRY_OF = "retry_of"  # the number of the trial whose parameters this one has
FIXED = "fixed_params"  # Optuna's system attribute: the parameters with which a trial was queued
VALUES = (TrialState.COMPLETE, TrialState.PRUNED)
_PARTS = {
    "directions": "directions",
    "objectives": "objectives",
    "space": "search space",
    "replicates": "replicates",
    "config": "keys",
}


class OptunaStudy:
    """A study: one search space, its trials so far, and a sampler.

    Every trial asked for has a new sampler, seeded by the number of points drawn before it: a resumed search
    goes on with the points that it would have had, and repeats none.
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

    def open(self, storage: BaseStorage) -> None:
        """Load the study from its storage, or create it there.

        Raises:
            UserError: a study of this name searches something else.
        """
        self.inner = optuna.create_study(
            storage=storage,
            study_name=self.name,
            directions=[StudyDirection[direction.upper()] for direction in self.settings.directions],
            load_if_exists=True,
        )
        for part, asked in self._asked().items():
            kept = self.inner.user_attrs.get(part, {})
            if not kept and not self.trials():
                self.inner.set_user_attr(part, asked)
            elif kept != asked:
                raise UserError(
                    f"the study {self.name} has other {_PARTS[part]}: {_differences(kept, asked)}; "
                    "give the command that began it, or choose another hydra.sweeper.study_name"
                )

    def _asked(self) -> dict[str, dict[str, str]]:
        return {
            "directions": {"directions": ",".join(self.settings.directions)},
            "objectives": {"objectives": ",".join(self.settings.objectives)},
            "space": self.space.describe(),
            "replicates": {"replicates": ", ".join(" ".join(lines) for lines in self.space.replicates)},
            "config": self.config,
        }

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in one of `states`, or all."""
        return self.inner.get_trials(deepcopy=False, states=states or None)

    @property
    def n_trials(self) -> int:
        """The number of trials that there are to be in all."""
        if self.settings.sampler != "grid":
            return self.settings.n_trials or TRIALS
        points = sum(1 for _ in self.space.grid())
        return min(points, self.settings.n_trials or points)

    def requeue(self, retry_failed: bool) -> None:
        """Queue again, with the same parameters, what a sweep that was killed left running; and the points of a grid.

        With `retry_failed` also queue again what has failed.
        """
        grid = self.settings.sampler == "grid"
        if retry_failed and (grid or self.missing()):
            for trial in self.failed():
                self._queue_again(trial)
        if self.missing() == 0:
            return
        for trial in self.trials(TrialState.RUNNING):
            self._queue_again(trial)
        if grid:
            for point in self.space.grid():
                self.inner.enqueue_trial(point, skip_if_exists=True)

    def failed(self) -> list[FrozenTrial]:
        """Return failed trials that were not queued again, without those broken off before they had a point."""
        again = {trial.user_attrs.get(RETRY_OF) for trial in self.trials()}
        return [trial for trial in self.trials(TrialState.FAIL) if trial.number not in again and self.has_point(trial)]

    def done(self) -> int:
        """Return the number of trials that count: with a value or pruned.

        Failed ones count too in a grid, as nothing can replace them.
        """
        return len(self.trials(*VALUES)) + (len(self.failed()) if self.settings.sampler == "grid" else 0)

    def missing(self) -> int:
        """Return the number of trials still to run."""
        return max(0, self.n_trials - self.done())

    def ask(self) -> optuna.Trial | None:
        """Return the next trial: one that is queued, or a new point; None if a grid has no more."""
        trials = self.trials()
        if self.settings.sampler == "grid" and not self.trials(TrialState.WAITING):
            return None
        drawn = sum(RETRY_OF not in trial.user_attrs and self.has_point(trial) for trial in trials)
        self.inner.sampler = make_sampler(self.settings, drawn)
        return self.inner.ask(fixed_distributions=dict(self.space.distributions))

    def has_point(self, trial: FrozenTrial) -> bool:
        """Whether all of a trial's parameters are known; a kill can break off the drawing of a point."""
        return _point(trial).keys() >= self.space.distributions.keys()

    def fail(self, trial: optuna.Trial, error: str) -> None:
        """Mark a trial as failed, with the reason."""
        trial.set_user_attr(ERROR, error)
        self.inner.tell(trial, state=TrialState.FAIL)

    def _queue_again(self, trial: FrozenTrial) -> None:
        """Queue a trial's point again, and end the trial.

        The new one comes first: a kill between the two loses nothing. A point of which a part was drawn is not queued:
        it does not count, so that the next is the same one.
        """
        queued = {waiting.user_attrs.get(RETRY_OF) for waiting in self.trials(TrialState.WAITING)}
        if trial.number not in queued and self.has_point(trial):
            self.inner.enqueue_trial(_point(trial), user_attrs={RETRY_OF: trial.number})
        if trial.state == TrialState.RUNNING:
            self.inner.tell(trial.number, state=TrialState.FAIL)


def shown(params: dict[str, Any]) -> str:
    """Return parameters as they are given on the command line."""
    return " ".join(f"{key}={value}" for key, value in params.items())


def make_sampler(settings: SearchSettings, drawn: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of one trial, before which `drawn` points were drawn."""
    # the plain sum would make the second point of sampler_seed=0 the first of sampler_seed=1
    seed = random.Random(f"{settings.sampler_seed} {drawn}").getrandbits(32)
    sampler = optuna.samplers.TPESampler if settings.sampler == "tpe" else optuna.samplers.RandomSampler
    return sampler(seed=seed)


def _point(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial's parameters, those included with which it was queued."""
    return {**trial.system_attrs.get(FIXED, {}), **trial.params}


def _differences(kept: dict[str, str], asked: dict[str, str]) -> str:
    """Return how two parts differ, such as `coef=interval(0,1), not interval(0,2)` for a key."""
    said = []
    for key in kept | asked:
        before, now = kept.get(key), asked.get(key)
        if before != now:
            names = [f"{key}={value}" if value else key for value in (before, now) if value is not None]
            alone = "is missing" if now is None else "is new"
            said.append(", not ".join(names) if len(names) == 2 else f"{names[0]} {alone}")
    return "; ".join(said)

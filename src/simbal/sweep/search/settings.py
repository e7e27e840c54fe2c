"""The keys of `hydra/sweeper=optuna`, and what each may be; optuna is not imported here."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from simbal.config.values import one_of
from simbal.errors import UserError

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "hyperband", "successive_halving")
DIRECTIONS = ("minimize", "maximize")
TRIALS = 20  # the number of trials where n_trials is null


@dataclass
class SearchSettings:
    """The settings of a search: its space, its sampler and pruner, and its storage."""

    params: dict[str, Any] = field(default_factory=dict)  # as on the command line: `seed: 0-4`
    arms: list[str] = field(default_factory=list)  # each a line of overrides, which has a study
    sampler: str = "tpe"  # tpe | random | grid
    sampler_seed: int = 0  # the k-th point of a study depends on it, on k and on the trials before
    n_trials: int | None = None  # in all, those of earlier commands included; null: 20, or every point of a grid
    n_jobs: int | None = None  # trials at a time; null: as many as keep the launcher busy
    max_failure_rate: float = 0.5  # failed trials that are replaced by others, as a share of n_trials
    replicates: str | None = "seed"  # the key whose values every trial runs; their mean counts
    objectives: list[str] = field(default_factory=lambda: ["val/ppl"])  # metrics of record.json
    directions: list[str] = field(default_factory=lambda: ["minimize"])  # minimize | maximize, for each objective
    pruner: str = "none"  # none | median | hyperband | successive_halving
    pruner_startup_trials: int = 5  # trials that run to their end before `median` stops one
    study_name: str | None = None  # null: the sweep's name
    storage: str | None = None  # null | memory | journal:FILE | sqlite:///FILE | URL of another database

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        one_of("hydra.sweeper.sampler", self.sampler, SAMPLERS)
        one_of("hydra.sweeper.pruner", self.pruner, PRUNERS)
        for direction in self.directions:
            one_of("hydra.sweeper.directions", direction, DIRECTIONS)
        if len(self.objectives) != len(self.directions):
            raise UserError(
                f"hydra.sweeper.directions=[{','.join(self.directions)}] must have one of minimize and maximize "
                f"for each of hydra.sweeper.objectives=[{','.join(self.objectives)}]"
            )
        if self.pruner != "none" and len(self.objectives) > 1:
            raise UserError(f"hydra.sweeper.pruner={self.pruner} needs a single objective, not {len(self.objectives)}")
        self._check_objectives()
        for key in ("n_trials", "n_jobs"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"hydra.sweeper.{key}={value} must be at least 1")

    def _check_objectives(self) -> None:
        from simbal.metrics.definitions import NUMBERS  # which every command would import

        measured = [metric.key for metric in NUMBERS]
        for objective in self.objectives:
            if objective not in measured:
                nearest = ", ".join(get_close_matches(objective, measured, 3, 0))
                raise UserError(f"hydra.sweeper.objectives: no run measures {objective}; there is {nearest}")

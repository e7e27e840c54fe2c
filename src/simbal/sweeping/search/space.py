"""The settings and the search space of `hydra/sweeper=optuna`.

Hydra loads this module for every command, so it imports Optuna only where it needs it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from simbal.config.values import check_choice
from simbal.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median", "hyperband", "successive_halving")
DIRECTIONS = ("minimize", "maximize")


@dataclass
class SearchSettings:
    """Settings of a search: its space, sampler, pruner and storage."""

    params: dict[str, Any] = field(default_factory=dict)  # overrides, such as `seed: 0-4`
    arms: list[str] = field(default_factory=list)  # lines of overrides; each arm has its own study
    sampler: str = "tpe"  # tpe | random
    sampler_seed: int = 0
    n_trials: int = 20  # total, including trials of earlier commands
    n_jobs: int | None = None  # trials at once; null: as many as the launcher has slots for
    max_failure_rate: float = 0.5  # fraction of n_trials that may fail and be replaced before the search stops
    replicates: str | None = "seed"  # each trial runs all values of this key; its objectives are the means
    objectives: list[str] = field(default_factory=lambda: ["val/ppl"])  # metrics of a run
    directions: list[str] = field(default_factory=lambda: ["minimize"])  # minimize | maximize, for each objective
    pruner: str = "none"  # none | median | hyperband | successive_halving
    pruner_startup_trials: int = 5  # trials that `median` never prunes
    study_name: str | None = None  # null: name=
    storage: str | None = None  # null: outputs/<name>/study.db | memory | journal:FILE | sqlite:///FILE | other URL

    def check(self) -> None:
        """Raise `UserError` for an invalid value."""
        check_choice("hydra.sweeper.sampler", self.sampler, SAMPLERS)
        check_choice("hydra.sweeper.pruner", self.pruner, PRUNERS)
        for direction in self.directions:
            check_choice("hydra.sweeper.directions", direction, DIRECTIONS)
        if len(self.objectives) != len(self.directions):
            raise UserError(
                f"hydra.sweeper.directions=[{','.join(self.directions)}] needs one of minimize and maximize for each "
                f"of hydra.sweeper.objectives=[{','.join(self.objectives)}]"
            )
        if self.pruner != "none" and len(self.objectives) > 1:
            raise UserError(f"hydra.sweeper.pruner={self.pruner} needs a single objective (got {len(self.objectives)})")
        for key in ("n_trials", "n_jobs"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise UserError(f"hydra.sweeper.{key}={value} must be at least 1")
        from simbal.metrics.definitions import NUMBERS  # not needed by other commands

        measured = [metric.key for metric in NUMBERS]
        for objective in self.objectives:
            if objective not in measured:
                closest = ", ".join(get_close_matches(objective, measured, 3, 0))
                raise UserError(f"hydra.sweeper.objectives={objective} is not a metric; the closest are {closest}")


@dataclass(frozen=True)
class SearchSpace:
    """The jobs of a study: fixed overrides, one value for each distribution, and all replicates."""

    fixed: tuple[str, ...]
    distributions: "Mapping[str, BaseDistribution]"
    replicates: tuple[tuple[str, ...], ...]  # ((),) for a single run per trial

    def jobs(self, params: Mapping[str, Any]) -> list[list[str]]:
        """Return the overrides of each job of a trial."""
        searched = [f"{key}={params[key]}" for key in self.distributions]
        return [[*self.fixed, *searched, *replicate] for replicate in self.replicates]

    def probes(self) -> Iterator[dict[str, Any]]:
        """Yield points that cover each choice and both ends of each interval.

        Each point differs from the first one in at most one key, so an error is due to that key's value.
        """
        values = {key: _probe_values(distribution) for key, distribution in self.distributions.items()}
        first = {key: of_key[0] for key, of_key in values.items()}
        yield first
        for key, of_key in values.items():
            for value in of_key[1:]:
                yield first | {key: value}


def build_space(overrides: Sequence[Override], replicates: str | None, integer_keys: Collection[str]) -> SearchSpace:
    """Sort overrides into fixed ones, searched ones and replicates. A later override of a key replaces earlier ones.

    Args:
        overrides: parsed overrides with expanded spans.
        replicates: the key whose values each trial runs.
        integer_keys: keys whose intervals contain only integers.

    Raises:
        UserError: an interval is invalid, or no key has several values.
    """
    last = {override.get_key_element(): override for override in overrides}
    fixed: list[str] = []
    distributions: dict[str, BaseDistribution] = {}
    replicate_lines: list[tuple[str, ...]] = [()]
    for key, override in last.items():
        if not override.is_sweep_override():
            fixed.append(key if override.value_type is None else f"{key}={override.get_value_element_as_str()}")
        elif key == replicates and not override.is_discrete_sweep():
            raise UserError(f"{override.input_line}: hydra.sweeper.replicates={key} needs a list of values")
        elif key == replicates:
            replicate_lines = [(f"{key}={value}",) for value in dict.fromkeys(override.sweep_string_iterator())]
        else:
            distributions[key] = _distribution(override, override.key_or_group in integer_keys)
    if not distributions:
        raise UserError(
            "nothing to search: give a key several values or an interval, "
            "such as 'balancing.simbal.coef=tag(log,interval(1e-3,10))'"
        )
    return SearchSpace(tuple(fixed), distributions, tuple(replicate_lines))


def _distribution(override: Override, is_integer: bool) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        log = "log" in value.tags
        try:
            if is_integer or isinstance(value.start, int):  # int(interval(1,64)) has integer ends
                return IntDistribution(int(value.start), int(value.end), log=log)
            return FloatDistribution(value.start, value.end, log=log)
        except ValueError as error:
            raise UserError(f"{override.input_line}: {error}") from None
    if isinstance(value, RangeSweep) and all(isinstance(n, int) for n in (value.start, value.stop, value.step)):
        # a sampler learns more from ordered numbers than from categories
        numbers = sorted(map(int, override.sweep_string_iterator()))
        return IntDistribution(numbers[0], numbers[-1], step=abs(int(value.step)))
    return CategoricalDistribution([*dict.fromkeys(override.sweep_string_iterator())])


def _probe_values(distribution: Any) -> Sequence[Any]:
    """Return all choices, or both ends of an interval."""
    return distribution.choices if hasattr(distribution, "choices") else (distribution.low, distribution.high)

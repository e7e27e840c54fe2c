"""The search space of a study: overrides with several values or an interval, beside those that its jobs share."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from simbal.errors import UserError


@dataclass(frozen=True)
class SearchSpace:
    """The jobs of a study: `fixed` overrides, one value for each of `distributions`, and one of `replicates`."""

    fixed: tuple[str, ...]
    distributions: Mapping[str, BaseDistribution]
    replicates: tuple[tuple[str, ...], ...]  # ((),) for a single run

    def jobs(self, params: Mapping[str, Any]) -> list[list[str]]:
        """Return the overrides of each job of a trial with these parameters."""
        point = [f"{key}={params[key]}" for key in self.distributions]
        return [[*self.fixed, *point, *replicate] for replicate in self.replicates]

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield every point, the last key fastest."""
        values = [_values(distribution) for distribution in self.distributions.values()]
        for point in itertools.product(*values):
            yield dict(zip(self.distributions, point, strict=True))

    def probes(self) -> Iterator[dict[str, Any]]:
        """Yield points that show each choice and both ends of each interval.

        After the first, a point differs from it in one key, so what is wrong with it is wrong with that value.
        """
        first = {key: _extremes(distribution)[0] for key, distribution in self.distributions.items()}
        yield first
        for key, distribution in self.distributions.items():
            for value in _extremes(distribution)[1:]:
                yield first | {key: value}


def build(
    overrides: Sequence[Override], replicates: str | None, integer_keys: Collection[str], *, grid: bool
) -> SearchSpace:
    """Sort overrides into fixed ones, searched ones and replicates; of two of one key the later counts.

    Args:
        overrides: as `spans.parse` reads them.
        replicates: the key whose values are not searched but all run.
        integer_keys: those for which an interval means whole numbers.
        grid: whether every point is to be run, which an interval does not allow.

    Raises:
        UserError: for an interval or a tag that cannot be searched, or if there is nothing to search.
    """
    last = {override.get_key_element(): override for override in overrides}
    fixed: list[str] = []
    distributions: dict[str, BaseDistribution] = {}
    repeated: list[tuple[str, ...]] = [()]
    for key, override in last.items():
        if key == replicates and override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise UserError(f"{override.input_line}: hydra.sweeper.replicates={key} takes values one by one")
            repeated = [(f"{key}={value}",) for value in dict.fromkeys(override.sweep_string_iterator())]
        elif override.is_sweep_override():
            distributions[key] = _distribution(override, override.key_or_group in integer_keys, grid)
        else:
            text = override.get_value_element_as_str() if override.value_type is not None else None
            fixed.append(key if text is None else f"{key}={text}")
    if not distributions:
        raise UserError(
            "there is nothing to search: give a key several values or an interval, "
            "such as 'balancing.simbal.coef=tag(log,interval(1e-3,10))'"
        )
    return SearchSpace(tuple(fixed), distributions, tuple(repeated))


def _distribution(override: Override, whole: bool, grid: bool) -> BaseDistribution:
    line, value = override.input_line, override.value()
    if not override.is_interval_sweep():
        if isinstance(value, RangeSweep) and all(isinstance(n, int) for n in (value.start, value.stop, value.step)):
            # numbers in order, of which a sampler can make more than of names
            numbers = sorted(map(int, override.sweep_string_iterator()))
            return IntDistribution(numbers[0], numbers[-1], step=abs(int(value.step)))
        return CategoricalDistribution([*dict.fromkeys(override.sweep_string_iterator())])
    if grid:
        raise UserError(f"{line}: a grid takes values one by one, not an interval")
    assert isinstance(value, IntervalSweep)
    return _interval(value, line, whole)


def _interval(interval: IntervalSweep, line: str | None, whole: bool) -> BaseDistribution:
    low, high, log = interval.start, interval.end, "log" in interval.tags
    assert low is not None
    assert high is not None
    try:
        if whole or isinstance(low, int):  # as int(interval(1,64)) makes it
            return IntDistribution(int(low), int(high), log=log)
        return FloatDistribution(low, high, log=log)
    except ValueError as error:
        raise UserError(f"{line}: {error}") from None


def _values(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution)
    return range(distribution.low, distribution.high + 1, distribution.step)


def _extremes(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]

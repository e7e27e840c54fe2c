"""The search space of a study: overrides with several values or an interval, beside those that its jobs share."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
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
        point = [f"{key}={_text(params[key])}" for key in self.distributions]
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

    def describe(self) -> dict[str, str]:
        """Return each key with what it may be, as text that two equal spaces share."""
        return {key: _describe(distribution) for key, distribution in self.distributions.items()}


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
    if replicates is not None and replicates != "seed" and replicates not in last:
        raise UserError(f"hydra.sweeper.replicates={replicates} needs values: {replicates}=a,b")
    return SearchSpace(tuple(fixed), distributions, tuple(repeated))


def _distribution(override: Override, whole: bool, grid: bool) -> BaseDistribution:
    line, value = override.input_line, override.value()
    tags = value.tags if isinstance(value, Sweep) else set()
    if tags - {"log"}:
        raise UserError(f"{line}: the tag {', '.join(sorted(map(str, tags - {'log'})))} means nothing here; log does")
    if not override.is_interval_sweep():
        if tags:
            raise UserError(f"{line}: log goes with an interval, not with single values")
        if isinstance(value, RangeSweep) and _is_whole(value.start, value.stop, value.step):
            return _steps(override)
        choices = _unique(override.sweep_string_iterator(), line)
        # shuffled anew by every command, which would make each another search space
        return CategoricalDistribution(sorted(choices) if getattr(value, "shuffle", False) else choices)
    if grid:
        raise UserError(f"{line}: a grid takes values one by one, not an interval")
    assert isinstance(value, IntervalSweep)
    return _interval(value, line, whole)


def _interval(interval: IntervalSweep, line: str | None, whole: bool) -> BaseDistribution:
    low, high, log = interval.start, interval.end, "log" in interval.tags
    assert low is not None
    assert high is not None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{line}: an interval goes from a smaller number to a larger one")
    if log and low <= 0:
        raise UserError(f"{line}: a logarithmic interval must begin above 0")
    if whole and (low != int(low) or high != int(high)):
        raise UserError(f"{line}: the key is a whole number, so both ends must be")
    if whole or isinstance(low, int):  # as int(interval(1,64)) makes it
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(low, high, log=log)


def _steps(override: Override) -> BaseDistribution:
    """Return whole numbers in order, of which a sampler can make more than of names."""
    numbers = sorted(map(int, _unique(override.sweep_string_iterator(), override.input_line)))
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return IntDistribution(numbers[0], numbers[-1], step=step)


def _unique(values: Iterable[str], line: str | None) -> list[str]:
    unique = [*dict.fromkeys(values)]
    if not unique:
        raise UserError(f"{line} has no values")
    return unique


def _is_whole(*numbers: Any) -> bool:
    return all(isinstance(number, int) for number in numbers)


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


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _describe(distribution: BaseDistribution) -> str:
    if isinstance(distribution, CategoricalDistribution):
        return ",".join(map(str, distribution.choices))
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    interval = f"interval({distribution.low},{distribution.high})"
    if isinstance(distribution, IntDistribution):
        interval = f"int({interval})" if distribution.step == 1 else f"{interval} by {distribution.step}"
    return f"tag(log,{interval})" if distribution.log else interval

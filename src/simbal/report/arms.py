"""The arms of a comparison: finished runs that differ in nothing but the seed, labelled by what tells them apart."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simbal.config.schema import GROUPS
from simbal.config.values import flatten
from simbal.report.collect import Run
from simbal.report.columns import ABSENT, Cell
from simbal.runs.record import is_number
from simbal.runs.spec import RunSpec, config_hash, result_keys

MOST_NAMED = 20  # arms in a sentence; the table has all


@dataclass(frozen=True)
class Arm:
    """A row of the table: its runs by seed, and the cell of each of its label columns."""

    label: dict[str, Cell]
    runs: tuple[Run, ...]
    setting: str  # the hash of everything but seed and balancing: arms that share it differ in balancing alone

    @property
    def balancing(self) -> str:
        """The names of its strategies, joined by underscores."""
        return self.runs[0].spec.choices["balancing"]

    @cached_property
    def name(self) -> str:
        """The label in one line."""
        return short_label(self.label)

    def answers_to(self, baseline: str | None) -> bool:
        """Whether it is the baseline, or one of several, by its balancing or its own name."""
        return baseline in (self.balancing, self.name)

    @property
    def seeds(self) -> list[int]:
        """The seeds that were run to their end."""
        return [run.seed for run in self.runs]

    def values(self, metric: str) -> dict[int, float]:
        """Return a metric by seed, for the runs that have it."""
        return {run.seed: value for run in self.runs if (value := run.value(metric)) is not None}


def short_label(label: Mapping[str, Cell]) -> str:
    """Return a label in one line, such as `simbal model=small coef=0.1`.

    Balancing stands by its value alone, other keys by their last part. A key of the strategy that is the whole
    balancing needs no more than its own name, whatever other arms have.
    """
    balancing = label["balancing"].text
    shown = {
        column.removeprefix(f"balancing.{balancing}."): cell.text
        for column, cell in label.items()
        if column != "balancing" and cell.text != ABSENT
    }
    keys = short_columns([*shown])
    return " ".join([balancing, *(f"{key}={text}" for key, text in zip(keys, shown.values(), strict=True))])


def short_columns(columns: Sequence[str]) -> list[str]:
    """Return the last part of each dotted key, or the whole key where two end alike."""
    lasts = [column.rpartition(".")[2] for column in columns]
    return [last if lasts.count(last) == 1 else column for last, column in zip(lasts, columns, strict=True)]


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence, of very many the first alone."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def seed_spans(seeds: Sequence[int]) -> str:
    """Return seeds as spans: `0-4,7` for 0, 1, 2, 3, 4 and 7."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def group(finished: Sequence[Run], columns: Sequence[str]) -> list[Arm]:
    """Return the arms of finished runs, labelled by `columns` and sorted by label, each with its runs by seed."""
    by_config: dict[str, list[Run]] = defaultdict(list)
    for run in finished:
        by_config[_hash_without(run.spec, "seed")].append(run)
    arms = [_arm(runs, columns) for runs in by_config.values()]
    return sorted(arms, key=lambda arm: [_sortable(cell) for cell in arm.label.values()])


def _arm(runs: Sequence[Run], columns: Sequence[str]) -> Arm:
    spec = runs[0].spec
    by_seed = tuple(sorted(runs, key=lambda run: run.seed))
    return Arm(label_of(spec, columns), by_seed, _hash_without(spec, "seed", "balancing"))


def label_columns(specs: Sequence[RunSpec]) -> list[str]:
    """Return the groups whose option differs between runs, and the dotted keys that differ under one option of theirs.

    `balancing` always comes first; the seed, and keys that cannot change a result, never come.
    """
    others = [name for name in GROUPS if name not in ("balancing", "logger")]
    groups = ["balancing", *(name for name in others if len({spec.choices.get(name) for spec in specs}) > 1)]
    parts: dict[tuple[str, str | None], dict[int, dict[str, Any]]] = defaultdict(dict)
    for spec in specs:
        for name, part in spec.written.items():
            of_option = parts[name, spec.choices.get(name)]
            if id(part) not in of_option:  # many runs share a group as they were read
                of_option[id(part)] = result_keys({name: part})
    keys = dict.fromkeys(key for of_option in parts.values() for key in _differing([*of_option.values()]))
    keys.pop("seed", None)
    return groups + sorted(keys, key=_place)


def _differing(configs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the keys that have several values in these configs, or are not in all of them."""
    for key in dict.fromkeys(key for config in configs for key in config):
        if len({repr(config.get(key, ABSENT)) for config in configs}) > 1:
            yield key


def _place(key: str) -> tuple[bool, str]:
    """Return where a key stands among label columns, whichever run is the first: those of strategies last, by name."""
    of_strategy = key.startswith("balancing.")
    return of_strategy, key if of_strategy else ""


def label_of(spec: RunSpec, columns: Sequence[str]) -> dict[str, Cell]:
    """Return the cell of each label column for a run; a dash where it has no such key."""
    flat = flatten(spec.written)
    values = {column: spec.choices[column] if column in GROUPS else flat.get(column, ABSENT) for column in columns}
    return {column: Cell(str(value), value if is_number(value) else None) for column, value in values.items()}


def _hash_without(spec: RunSpec, *keys: str) -> str:
    return config_hash({key: value for key, value in spec.written.items() if key not in keys})


def _sortable(cell: Cell) -> tuple[bool, float, str]:
    return cell.value is None, cell.value or 0.0, cell.text

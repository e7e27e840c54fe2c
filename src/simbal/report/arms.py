"""The arms of a comparison: finished runs that differ only in the seed, labeled by the keys in which arms differ."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from simbal.config.options import options, overridden_options
from simbal.config.schema import GROUPS
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.report.collect import Run
from simbal.report.columns import ABSENT, Cell
from simbal.runs.folder import RunFolder
from simbal.runs.record import is_number
from simbal.runs.spec import RunSpec, config_hash, result_keys, run_names

MOST_NAMED = 5  # names listed in a sentence


@dataclass(frozen=True)
class Arm:
    """A row of the table: its runs by seed, and the cell of each label column."""

    label: dict[str, Cell]
    runs: tuple[Run, ...]
    setting: str  # hash of the config without seed and balancing: arms that share it differ only in balancing

    @property
    def balancing(self) -> str:
        """The names of its strategies, joined by underscores."""
        return self.runs[0].spec.choices["balancing"]

    @cached_property
    def name(self) -> str:
        """The label on one line."""
        return short_label(self.label)

    def is_baseline(self, baseline: str | None) -> bool:
        """Whether `baseline` is the arm's balancing or name."""
        return baseline in (self.balancing, self.name)

    @property
    def seeds(self) -> list[int]:
        """The seeds of its finished runs."""
        return [run.seed for run in self.runs]

    @property
    def untrained(self) -> str:
        """Why no conclusions can be drawn from its runs; empty if they are trained."""
        return next((run.untrained for run in self.runs if run.untrained), "")

    def values(self, metric: str) -> dict[int, float]:
        """Return a metric by seed, for the runs that have it."""
        return {run.seed: value for run in self.runs if (value := run.value(metric)) is not None}


def group_runs(finished: Sequence[Run], columns: Sequence[str]) -> list[Arm]:
    """Group finished runs into arms with the label columns `columns`, sorted by label."""
    by_config: dict[str, list[Run]] = defaultdict(list)
    for run in finished:
        by_config[_hash_without(run.spec, "seed")].append(run)
    arms = []
    for runs in by_config.values():
        spec = runs[0].spec
        by_seed = tuple(sorted(runs, key=lambda run: run.seed))
        arms.append(Arm(label_of(spec, columns), by_seed, _hash_without(spec, "seed", "balancing")))
    return sorted(
        arms, key=lambda arm: [(cell.value is None, cell.value or 0.0, cell.text) for cell in arm.label.values()]
    )


def label_columns(specs: Sequence[RunSpec]) -> list[str]:
    """Return the groups and the dotted keys that differ between runs.

    `balancing` always comes first and the strategies' keys come last. A key is compared among runs with the same option
    of its group. The seed, keys that cannot affect results and options that follow from the strategy are left out.
    """
    others = [name for name in GROUPS if name not in ("balancing", "logger")]
    groups = ["balancing", *(name for name in others if _differs(name, specs))]
    parts: dict[tuple[str, str | None], dict[int, dict[str, Any]]] = defaultdict(dict)
    for spec in specs:
        for name, part in spec.written.items():
            of_option = parts[name, spec.choices.get(name)]
            if id(part) not in of_option:  # runs share the dicts of equal groups
                of_option[id(part)] = result_keys({name: part})
    keys = dict.fromkeys(key for of_option in parts.values() for key in _differing_keys([*of_option.values()]))
    keys.pop("seed", None)
    return groups + sorted(keys, key=lambda key: (key.startswith("balancing."), key.startswith("balancing.") and key))


def label_of(spec: RunSpec, columns: Sequence[str]) -> dict[str, Cell]:
    """Return a run's cell for each label column; a dash if the run has no such key."""
    flat = flatten(spec.written)
    values = {column: spec.choices[column] if column in GROUPS else flat.get(column, ABSENT) for column in columns}
    return {column: Cell(str(value), value if is_number(value) else None) for column, value in values.items()}


def with_folders(specs: Sequence[RunSpec], columns: Sequence[str] = ()) -> list[RunSpec]:
    """Return runs with their folders: the existing one, or a new one named after its arm.

    Args:
        specs: the runs.
        columns: the keys that tell arms apart; empty: the keys that differ among all runs of outputs/<name>.
    """
    names: dict[Path, dict[str, str]] = {}
    for parent in {spec.parent for spec in specs}:
        names[parent] = run_names(parent)
        ours = [spec for spec in specs if spec.parent == parent]
        new = [spec for spec in ours if spec.suffix not in names[parent]]
        shown = columns or label_columns([*ours, *_readable_specs(parent)] if new else [])
        names[parent] |= {spec.suffix: spec.name_for(short_label(label_of(spec, shown))) for spec in new}
    return [replace(spec, folder=spec.parent / names[spec.parent][spec.suffix]) for spec in specs]


def _readable_specs(folder: Path) -> Iterator[RunSpec]:
    """Yield the runs in outputs/<name>, without those whose config is damaged."""
    for path in folder.glob("*/"):
        with suppress(UserError):
            yield RunFolder(path).read_spec()


def short_label(label: Mapping[str, Cell]) -> str:
    """Return a label on one line, such as `simbal model=small coef=0.1`.

    A key of the arm's only strategy is shortened to its last part, regardless of the keys of other arms.
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
    """Return the last part of each dotted key, or the full key if two have the same last part."""
    lasts = [column.rpartition(".")[2] for column in columns]
    return [last if lasts.count(last) == 1 else column for last, column in zip(lasts, columns, strict=True)]


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: list the first few and count the rest."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def seed_ranges(seeds: Sequence[int]) -> str:
    """Return seeds as ranges: `0-4,7` for 0, 1, 2, 3, 4 and 7."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][1] + 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def _differing_keys(configs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the keys that have several values in these configs, or are missing in some."""
    for key in dict.fromkeys(key for config in configs for key in config):
        if len({repr(config.get(key, ABSENT)) for config in configs}) > 1:
            yield key


def _differs(group: str, specs: Sequence[RunSpec]) -> bool:
    """Return whether runs differ in the option of a group, except for options that follow from their strategy."""
    chosen: dict[str, set[str | None]] = defaultdict(set)
    for spec in specs:
        chosen[spec.choices["balancing"]].add(spec.choices.get(group))
    if len(set().union(*chosen.values())) == 1:
        return False
    files = options("balancing")
    implied = {name: overridden_options(files[name]).get(group) for name in chosen if name in files}
    free = {option for name, of_arm in chosen.items() if of_arm != {implied.get(name)} for option in of_arm}
    return len(free) > 1


def _hash_without(spec: RunSpec, *keys: str) -> str:
    return config_hash({key: value for key, value in spec.written.items() if key not in keys})

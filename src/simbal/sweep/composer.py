"""Composes the jobs of a sweep: through Hydra once for all jobs that differ in nothing but plain values."""

import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from simbal.config.check import checked
from simbal.config.schema import GROUPS, as_dict
from simbal.config.values import Shared, changed, flatten
from simbal.errors import UserError
from simbal.runs.spec import RunSpec
from simbal.sweep import spans

PLAIN_KEY = re.compile(r"\w+(\.\w+)*")
INTERPOLATION, MISSING = "${", "???"
Values = dict[str, Any]  # plain ones, by dotted key


class Job(list[str]):
    """A job as a list of overrides, which any launcher can take, with its run, so that ours need not compose again."""

    def __init__(self, overrides: Sequence[str], spec: RunSpec) -> None:
        super().__init__(overrides)
        self.spec = spec


class Composer:
    """A composer that gives each job the run that Hydra would compose for it, in a hundredth of the time.

    A plain value is a number, a text, true, false, null or a list of them for a key that is there and that no other
    override of the job touches. Jobs that share all other overrides, and give plain values to the same keys, have the
    config of the first of them but for these values. Where a config holds an interpolation, Hydra composes each job, as
    one value may then stand for another.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        """Set Hydra's loader and `master`, the config of the sweep."""
        self.loader, self.master = loader, master
        self.groups = frozenset(loader.list_groups(""))
        # the first of each kind of job, and its config as plain values; None: Hydra composes all
        self.first: dict[Hashable, tuple[RunSpec, dict[str, Any]] | None] = {}
        self.of_options: dict[Hashable, Any] = {}  # what options compose to by themselves

    def job(self, overrides: Sequence[str]) -> Job:
        """Compose and check one job; one that is composed already comes back as it is.

        Raises:
            UserError: if the composed config is not one that can be run.
            HydraException: if it cannot be composed.
        """
        if isinstance(overrides, Job):
            return overrides
        return Job(overrides, self._spec([*overrides]))

    def own_keys(self, jobs: Sequence[Sequence[str]], given: Collection[str]) -> list[list[str]]:
        """Return the overrides of each job without those of keys that only the options of other jobs have.

        With `balancing=simbal,lbl balancing.simbal.coef=0.1,1` a job of `lbl` is the same for both coefficients.

        Raises:
            UserError: for a key among `given` that no job has.
        """
        pairs = [(job, set(self.foreign(job))) for job in jobs]
        kept = {spans.read(line).key_or_group for job, foreign in pairs for line in job if line not in foreign}
        for line in (line for job, foreign in pairs for line in job if line in foreign):
            if (key := spans.read(line).key_or_group) in given and key not in kept:
                raise UserError(f"{line}: no arm of the sweep has the key {key}")
        return [[line for line in job if line not in foreign] for job, foreign in pairs]

    def foreign(self, overrides: Sequence[str]) -> list[str]:
        """Return those of a job's overrides that are for keys which the options that it chooses do not have."""
        lines = {line: spans.read(line) for line in overrides}
        options = tuple(line for line, override in lines.items() if self.chooses_option(override))
        keyed = {line: _place(override) for line, override in lines.items() if line not in options}
        within = {line: place for line, place in keyed.items() if place.partition(".")[0] in GROUPS}
        if not within:
            return []
        if options not in self.of_options:
            composed = self.loader.load_sweep_config(self.master, [*options])
            self.of_options[options] = OmegaConf.to_container(composed, resolve=False)
        return [line for line, place in within.items() if not _has(self.of_options[options], place)]

    def _spec(self, lines: list[str]) -> RunSpec:
        values = self._plain_values(lines)
        others = tuple(line for line in lines if spans.read(line).key_or_group not in values) if values else ()
        kind = (others, frozenset((key, isinstance(value, list)) for key, value in values.items()))
        first = self.first.get(kind) if values else None
        if first is not None:
            return _with_values(*first, values)
        composed = self.loader.load_sweep_config(self.master, lines)
        spec = RunSpec.from_hydra(composed)
        if values and kind not in self.first:
            self.first[kind] = _shared(spec) if _stands_for_others(spec, composed, values) else None
        return spec

    def _plain_values(self, lines: Sequence[str]) -> Values:
        """Return a job's plain values by key; none if one of its overrides may touch what another one does."""
        try:
            overrides = [*map(spans.read, lines)]
        except HydraException:
            return {}  # Hydra will say so itself
        keyed = [override for override in overrides if not self.chooses_option(override)]
        keys = sorted(f"{override.key_or_group}." for override in keyed)
        if any(later.startswith(key) for key, later in pairwise(keys)):
            return {}
        if not all(PLAIN_KEY.fullmatch(override.key_or_group) for override in keyed):
            return {}
        return {override.key_or_group: override.value() for override in keyed if _is_plain(override)}

    def chooses_option(self, override: Override) -> bool:
        """Whether an override chooses the option of a group, rather than the value of a key."""
        group = "/" in override.key_or_group or override.key_or_group in self.groups
        return group and not isinstance(override.value(), dict)  # Hydra takes a dict for the values of the group's keys


def _place(override: Override) -> str:
    """Return the key that must be there for an override: the one that it changes, or the parent of one that it adds."""
    adds = override.is_add() or override.is_force_add()
    return override.key_or_group.rpartition(".")[0] if adds else override.key_or_group


def _has(config: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return False
        config = config[part]
    return True


def _is_plain(override: Override) -> bool:
    of_a_value = override.type == OverrideType.CHANGE and override.value_type == ValueType.ELEMENT
    return of_a_value and _is_plain_value(override.value())


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain_value, value))
    if isinstance(value, str):
        return INTERPOLATION not in value and value != MISSING
    return value is None or isinstance(value, bool | int | float)


def _stands_for_others(spec: RunSpec, composed: DictConfig, values: Values) -> bool:
    """Whether no value of the config depends on another, and `values` are where their keys say."""
    unresolved = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(unresolved, dict)
    del unresolved["hydra"]
    written = flatten(spec.written)
    return INTERPOLATION not in repr(unresolved) and all(
        key in written and repr(written[key]) == repr(value) for key, value in values.items()
    )


def _shared(spec: RunSpec) -> tuple[RunSpec, dict[str, Any]]:
    """Return a run and its config as plain values, both with groups that others of its kind may share."""
    written, plain = (
        {name: Shared(value) if isinstance(value, dict) else value for name, value in config.items()}
        for config in (spec.written, as_dict(spec.config))
    )
    return replace(spec, written=written), plain


def _with_values(spec: RunSpec, plain: dict[str, Any], values: Values) -> RunSpec:
    """Return the same run with other values."""
    config = checked(changed(plain, values))
    return replace(spec, config=config, written=changed(spec.written, values))

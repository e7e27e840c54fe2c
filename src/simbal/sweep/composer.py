"""Composes the jobs of a sweep: with Hydra once per choice of options, then with plain values set on a copy.

A composition takes 70 ms; setting values and checking them takes 0.3 ms.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from omegaconf import DictConfig, OmegaConf

from simbal.config import spans
from simbal.config.compose import MISSING
from simbal.config.messages import unknown_key
from simbal.config.schema import GROUPS
from simbal.config.values import with_values
from simbal.errors import ConfigError
from simbal.runs.spec import RunSpec

INTERPOLATION = "${"


class Job(list[str]):
    """A job as a list of overrides, which any launcher takes, with its run, which a launcher need not compose."""

    def __init__(self, overrides: Sequence[str], spec: RunSpec) -> None:
        super().__init__(overrides)
        self.spec = spec


class Base(NamedTuple):
    """What a choice of options composes to, with unresolved values, and its choices in each group."""

    written: dict[str, Any]
    choices: dict[str, str]
    interpolates: bool  # one value may depend on another


class Composer:
    """Gives each job the run that Hydra would compose for it."""

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        """Set Hydra's loader and `master`, the config of the sweep."""
        self.loader, self.master = loader, master
        self.groups = frozenset(loader.list_groups(""))
        self.bases: dict[tuple[str, ...], Base] = {}

    def job(self, overrides: Sequence[str]) -> Job:
        """Compose and check one job. A `Job` is returned as it is.

        Raises:
            ConfigError: the composed config is wrong.
            HydraException: it cannot be composed.
        """
        if isinstance(overrides, Job):
            return overrides
        lines = [*overrides]
        return Job(lines, self._quick(lines) or RunSpec.from_hydra(self._compose(lines)))

    def own_keys(self, jobs: Sequence[Sequence[str]], given: Collection[str]) -> list[list[str]]:
        """Return the overrides of each job without the keys that only options of other jobs have.

        With `balancing=simbal,lbl balancing.simbal.coef=0.1,1` an lbl job is the same for both coefficients.

        Raises:
            ConfigError: no job has a key of `given`.
        """
        pairs = [(job, set(self.foreign(job))) for job in jobs]
        kept = {spans.read(line).key_or_group for job, foreign in pairs for line in job if line not in foreign}
        for line in (line for job, foreign in pairs for line in job if line in foreign):
            if (key := spans.read(line).key_or_group) in given and key not in kept:
                raise ConfigError(unknown_key(key))
        return [[line for line in job if line not in foreign] for job, foreign in pairs]

    def foreign(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of a job whose keys its options do not have."""
        lines = {line: spans.read(line) for line in overrides}
        options = tuple(line for line, override in lines.items() if self.chooses_option(override))
        places = {line: _place(override) for line, override in lines.items() if line not in options}
        within = {line: place for line, place in places.items() if place.partition(".")[0] in GROUPS}
        return [line for line, place in within.items() if _at(self._base(options).written, place) is _at]

    def chooses_option(self, override: Override) -> bool:
        """Whether an override chooses an option of a group, rather than the value of a key."""
        group = "/" in override.key_or_group or override.key_or_group in self.groups
        return group and not isinstance(override.value(), dict)  # Hydra takes a dict for values of the group's keys

    def _quick(self, lines: list[str]) -> RunSpec | None:
        """Return the run of a job of options and plain values; None if Hydra has to compose it."""
        options, values = [], dict[str, Any]()
        for line in lines:
            override = spans.read(line)
            if self.chooses_option(override) and override.type == OverrideType.CHANGE:
                options.append(line)
            elif not _is_plain(override) or override.key_or_group in values:
                return None
            else:
                values[override.key_or_group] = override.value()
        base = self._base(tuple(options))
        if base.interpolates:
            return None
        if any(isinstance(_at(base.written, key), dict) or _at(base.written, key) is _at for key in values):
            return None
        written = with_values(base.written, values)
        return RunSpec.checked(written, base.choices)

    def _base(self, options: tuple[str, ...]) -> Base:
        if options not in self.bases:
            cfg = self._compose(options)
            choices = {group: str(option) for group, option in cfg.hydra.runtime.choices.items()}
            own = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
            assert isinstance(own, dict)
            written = {str(key): value for key, value in own.items()}
            self.bases[options] = Base(written, choices, INTERPOLATION in repr(written))
        return self.bases[options]

    def _compose(self, lines: Sequence[str]) -> DictConfig:
        return self.loader.load_sweep_config(self.master, [*lines])


def _place(override: Override) -> str:
    """Return the key that an override needs: the one that it changes, or the parent of one that it adds."""
    adds = override.is_add() or override.is_force_add()
    return override.key_or_group.rpartition(".")[0] if adds else override.key_or_group


def _at(config: Any, key: str) -> Any:
    """Return the value at a dotted key; this function itself if there is no such key."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return _at
        config = config[part]
    return config


def _is_plain(override: Override) -> bool:
    """Whether an override sets a number, a text, true, false, null or a list of these."""
    of_a_value = override.type == OverrideType.CHANGE and override.value_type == ValueType.ELEMENT
    return of_a_value and _is_plain_value(override.value())


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain_value, value))
    if isinstance(value, str):
        return INTERPOLATION not in value and value != MISSING
    return value is None or isinstance(value, bool | int | float)

"""Compose the jobs of a sweep: Hydra composes each choice of options once, then plain values are set on a copy.

Hydra takes 70 ms for a job. Setting values on a composed config and validating it takes 0.3 ms.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from omegaconf import DictConfig, OmegaConf

from simbal.config import spans
from simbal.config.compose import MISSING
from simbal.config.messages import unknown_key
from simbal.config.schema import GROUPS
from simbal.config.values import flatten, with_values
from simbal.errors import ConfigError
from simbal.runs.spec import RunSpec

INTERPOLATION = "${"


class Job(list[str]):
    """The overrides of one job, as every launcher takes them, with the composed run as `spec`."""

    def __init__(self, overrides: Sequence[str], spec: RunSpec) -> None:
        super().__init__(overrides)
        self.spec = spec


@dataclass(frozen=True)
class ComposedOptions:
    """The config of one choice of options, with unresolved interpolations."""

    written: dict[str, Any]
    choices: dict[str, str]
    leaves: dict[str, Any]  # values by dotted key
    keys: frozenset[str]  # dotted keys of values and of the sections that contain them
    has_interpolation: bool


class Composer:
    """Compose jobs to the same runs as Hydra, but faster."""

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        """Take Hydra's loader and `master`, the config of the sweep."""
        self.loader, self.master = loader, master
        self.groups = frozenset(loader.list_groups(""))
        self.composed: dict[tuple[str, ...], ComposedOptions] = {}

    def job(self, overrides: Sequence[str]) -> Job:
        """Compose and validate one job. A `Job` is returned unchanged.

        Raises:
            ConfigError: the composed config is invalid.
            HydraException: the job cannot be composed.
        """
        if isinstance(overrides, Job):
            return overrides
        lines = [*overrides]
        spec = self._set_values(lines)
        return Job(lines, spec or RunSpec.from_hydra(self.loader.load_sweep_config(self.master, lines)))

    def drop_inapplicable(self, jobs: Sequence[Sequence[str]], required: Collection[str]) -> list[list[str]]:
        """Remove from each job the overrides whose keys its options do not have.

        With `balancing=simbal,lbl balancing.simbal.coef=0.1,1`, both lbl jobs become the same job.

        Args:
            jobs: the overrides of each job.
            required: keys that at least one job must have.

        Raises:
            ConfigError: no job has a required key.
        """
        inapplicable = [{*self.inapplicable_overrides(job)} for job in jobs]
        applicable = [[line for line in job if line not in lost] for job, lost in zip(jobs, inapplicable, strict=True)]
        kept = {spans.read(line).key_or_group for job in applicable for line in job}
        lost_keys = (spans.read(line).key_or_group for lines in inapplicable for line in lines)
        for key in lost_keys:
            if key in required and key not in kept:
                raise ConfigError(unknown_key(key))
        return applicable

    def inapplicable_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of a job whose keys its options do not have."""
        lines = {line: spans.read(line) for line in overrides}
        options = tuple(line for line, override in lines.items() if self.chooses_option(override))
        keys = {line: _required_key(override) for line, override in lines.items() if line not in options}
        grouped = {line: key for line, key in keys.items() if key.partition(".")[0] in GROUPS}
        return [line for line, key in grouped.items() if key not in self._compose_options(options).keys]

    def chooses_option(self, override: Override) -> bool:
        """Return whether an override selects an option of a group, rather than setting a key."""
        is_group = "/" in override.key_or_group or override.key_or_group in self.groups
        return is_group and not isinstance(override.value(), dict)  # a dict sets keys of the group

    def _set_values(self, lines: list[str]) -> RunSpec | None:
        """Return the run of a job of options and plain values, or None if Hydra must compose the job."""
        options, values = [], dict[str, Any]()
        for line in lines:
            override = spans.read(line)
            if self.chooses_option(override) and override.type == OverrideType.CHANGE:
                options.append(line)
            elif _sets_plain_value(override) and override.key_or_group not in values:
                values[override.key_or_group] = override.value()
            else:
                return None
        base = self._compose_options(tuple(options))
        if base.has_interpolation or any(isinstance(base.leaves.get(key, {}), dict) for key in values):
            return None
        return RunSpec.from_resolved(with_values(base.written, values), base.choices)

    def _compose_options(self, options: tuple[str, ...]) -> ComposedOptions:
        if options not in self.composed:
            cfg = self.loader.load_sweep_config(self.master, [*options])
            choices = {group: str(option) for group, option in cfg.hydra.runtime.choices.items()}
            plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
            assert isinstance(plain, dict)
            written = {str(key): value for key, value in plain.items()}
            leaves = flatten(written)
            keys = frozenset(key for leaf in leaves for key in accumulate(leaf.split("."), "{}.{}".format))
            self.composed[options] = ComposedOptions(written, choices, leaves, keys, INTERPOLATION in repr(written))
        return self.composed[options]


def _required_key(override: Override) -> str:
    """Return the key that must exist for an override: its own key, or the parent of a key that it adds."""
    adds = override.is_add() or override.is_force_add()
    return override.key_or_group.rpartition(".")[0] if adds else override.key_or_group


def _sets_plain_value(override: Override) -> bool:
    """Return whether an override sets a number, text, true, false, null or a list of these."""
    sets_value = override.type == OverrideType.CHANGE and override.value_type == ValueType.ELEMENT
    return sets_value and _is_plain(override.value())


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return INTERPOLATION not in value and value != MISSING
    return value is None or isinstance(value, bool | int | float)

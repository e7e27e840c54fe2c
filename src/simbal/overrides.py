"""Checks `key=value` overrides against the YAML files: an unknown name is an error that says what was meant.

Hydra composes without structured configs, so `+balancing.simbal.coeff=3` would pass it in silence, and what
it does refuse it refuses without naming what is near.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, Sweep

from simbal.catalogue import SWEEPS, Catalogue
from simbal.config import flatten, integer_keys
from simbal.errors import UserError
from simbal.sweep import spans


def check_overrides(overrides: Iterable[Override], catalogue: Catalogue) -> None:
    """Raise `UserError` for a group, an option, a key or a kind of value that the YAML files do not have."""
    overrides = [override for override in overrides if not override.is_hydra_override()]
    for override in overrides:
        if override.package is not None:
            raise UserError(f"{override.input_line}: a group's place in the config is fixed; leave out the @")
        if override.key_or_group in catalogue.options:
            _check_options(override, catalogue)
    choices = _choices(overrides, catalogue)
    keys = catalogue.root_keys()
    for group, options in choices.items():
        for option in options:
            keys |= catalogue.option_keys(group, option)
    for override in overrides:
        if override.is_add() or override.is_force_add():
            hint = _nearest(override.key_or_group, [*keys, *catalogue.options])
            raise UserError(f"{override.input_line} would add a key, but every key there is exists already{hint}")
        if override.key_or_group not in catalogue.options:
            _check_key(override, keys, catalogue)


def _choices(overrides: list[Override], catalogue: Catalogue) -> dict[str, list[str]]:
    """The options chosen in each group, the named sweep's and those that are swept over included."""
    chosen = {o.key_or_group: _options(o, catalogue) for o in overrides if o.key_or_group in catalogue.options}
    choices = catalogue.default_choices()
    for sweep in chosen.get(SWEEPS, choices.get(SWEEPS, [])):
        choices |= catalogue.sweep_choices(sweep)
        grid = spans.parse(catalogue.sweep_lines(sweep), integer_keys(), OverridesParser.create())
        choices |= {o.key_or_group: _options(o, catalogue) for o in grid if o.key_or_group in catalogue.options}
    return choices | chosen


def _check_options(override: Override, catalogue: Catalogue) -> None:
    group = override.key_or_group
    available = catalogue.options[group]
    options = _options(override, catalogue)
    for option in options:
        if option not in available:
            raise UserError(
                f"{override.input_line}: {group} has no option {option}{_nearest(option, available)} "
                f"(there is {', '.join(available)})"
            )
    if not options and not override.is_delete() and group != SWEEPS:
        raise UserError(f"{override.input_line} chooses nothing: {group} has {', '.join(available)}")


def _options(override: Override, catalogue: Catalogue) -> list[str]:
    """Names of the options that a group override chooses, each once."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter([*catalogue.options[override.key_or_group]])
    names: dict[str, None] = {}
    for choice in _values(override):
        for name in choice if isinstance(choice, list) else [choice]:
            if name not in (None, ""):
                names[str(name)] = None
    return [*names]


def _values(override: Override) -> list[Any]:
    """The values that an override gives its key: one, or those of a sweep; an interval's two ends."""
    value = override.value()
    if not isinstance(value, Sweep):
        return [value]
    if isinstance(value, IntervalSweep):
        return [value.start, value.end]
    return [item.text if isinstance(item, QuotedString) else item for item in override.sweep_iterator()]


def _check_key(override: Override, keys: dict[str, Any], catalogue: Catalogue) -> None:
    name, line = override.key_or_group, override.input_line
    if "/" in name:
        raise UserError(f"{line}: there is no group {name}{_nearest(name, catalogue.options)}")
    if override.is_delete():
        _check_known(name, line, keys, catalogue)
    for value in [] if override.is_delete() else _values(override):
        for key, leaf in flatten({name: value}).items():
            _check_known(key, line, keys, catalogue)
            default = keys.get(key)
            if key.startswith("balancing.") and default is not None and _kind(leaf) != _kind(default):
                raise UserError(f"{line}: {key} must be {_kind(default)}, such as {default}")


def _check_known(key: str, line: str | None, keys: dict[str, Any], catalogue: Catalogue) -> None:
    if any(f"{known}.".startswith(f"{key}.") for known in keys):
        return
    for group, options in catalogue.options.items():
        for option in options:
            if group != SWEEPS and key in catalogue.option_keys(group, option):
                raise UserError(f"{line}: {key} belongs to {group}={option}, which is not chosen")
    raise UserError(f"{line}: there is no key {key}{_nearest(key, [*keys, *catalogue.options])}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        try:
            float(value)  # YAML 1.1 reads 1e-3 as text, Hydra as a number
        except ValueError:
            return "text"
    return "a number" if isinstance(value, int | float | str) else type(value).__name__


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean a or b?`, the likeliest first, or nothing."""
    likeness = {candidate: _likeness(name, candidate) for candidate in candidates}
    best = max(likeness.values(), default=0.0)
    likely = sorted((c for c in likeness if likeness[c] >= max(0.6, 0.9 * best)), key=lambda c: -likeness[c])
    return f"; did you mean {' or '.join(likely[:3])}?" if likely else ""


def _likeness(name: str, candidate: str) -> float:
    """0 to 1: of the whole names and of their last parts, of which one may be a word of the other."""
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    last, other = name.rpartition(".")[2], candidate.rpartition(".")[2]
    if last in other.split("_") or other in last.split("_"):
        return (whole + 1) / 2
    return (whole + difflib.SequenceMatcher(None, last, other).ratio()) / 2

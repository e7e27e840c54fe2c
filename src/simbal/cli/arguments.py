"""Checks the arguments of a program before Hydra reads them, and writes out their spans.

An unknown name is an error that says what was meant: Hydra composes without structured configs, so that
`+balancing.simbal.coeff=3` would pass it in silence, and what it does refuse it refuses without naming what is near.
"""

import re
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, Sweep

from simbal.cli.again import begun_from, run_of
from simbal.cli.hydra_keys import check_hydra, check_launcher, sweeper_lines
from simbal.cli.nearest import meant, nearest
from simbal.cli.words import read_words
from simbal.config.catalogue import MISSING, SWEEPS, Catalogue, split_arm
from simbal.config.schema import every_key, integer_keys, open_keys
from simbal.config.values import accepts, flatten
from simbal.errors import UserError
from simbal.runs.spec import RunSpec
from simbal.sweep import spans

UNTYPED = ("balancing", "analysis")  # groups whose options are classes and functions: no dataclass knows their keys
ELSEWHERE = ("run", "hydra.launcher.n_jobs")  # keys of train.py that no file of conf/ has
TOGETHER = re.compile(r"[+&|/; ]")  # what stands between options in the place of a comma


def checked_arguments(catalogue: Catalogue, arguments: Sequence[str] | None = None) -> list[str] | RunSpec:
    """Return what Hydra is told instead of the arguments: the same with their spans written out, and flags first.

    Args:
        catalogue: the names that there are.
        arguments: None: `sys.argv[1:]`.

    Returns:
        The arguments; or the run at `run=`, which needs no Hydra.

    Raises:
        UserError: for a name that is not in `catalogue`, and for flags and values that make no sense together.
    """
    said = sys.argv[1:] if arguments is None else [*arguments]
    args = read_words(said, catalogue)
    if args.shell_completion or args.hydra_help:
        return said
    given = spans.parse(args.overrides, integer_keys(), OverridesParser.create())
    trains = SWEEPS in catalogue.options
    if trains and (run := run_of(given)):
        if args.multirun or args.cfg:
            raise UserError("run= goes on with one run: leave out -m and --cfg")
        if _is_dry(given):
            raise UserError("run= goes on with one run, and dry_run=true runs none: leave out one of them")
        return run
    overrides = begun_from(given, catalogue) if trains else given
    check_launcher(overrides)
    check_overrides(overrides, catalogue)
    _check_mode(args, given, sweeps=trains)
    flags = [argument for argument in said if argument not in args.overrides]
    if args.config_path:  # Hydra would look for it beside a module of ours
        flags.append(f"--config-path={Path(args.config_path).absolute()}")
    if trains and _is_dry(overrides) and not (args.multirun or args.cfg or _mode(overrides)):
        flags.append("-m")  # a dry run of one run is that of a sweep of one
    return [*flags, *(str(override.input_line) for override in overrides), *_sweeper(overrides, catalogue)]


def _sweeper(overrides: list[Override], catalogue: Catalogue) -> list[str]:
    """Return the sweeper that a named sweep chooses, as an override.

    In a defaults list the root config's choice would win.
    """
    given = {override.key_or_group: override.value() for override in overrides}
    sweep = given.get(SWEEPS)
    chosen = catalogue.sweeper(str(sweep))[0] if sweep and "hydra/sweeper" not in given else None
    return [f"hydra/sweeper={chosen}"] if chosen else []


def _check_mode(args: Namespace, overrides: list[Override], *, sweeps: bool) -> None:
    """Raise `UserError` for flags and overrides that do not go together.

    `sweeps`: whether the program has named sweeps; one that has none takes one config at a time.
    """
    mode = _mode(overrides)
    if args.multirun and args.cfg:
        raise UserError("--cfg shows the config of one run: leave out -m")
    if any(o.key_or_group == SWEEPS and o.is_sweep_override() for o in overrides):
        raise UserError("sweeps= takes one named sweep at a time")
    if args.multirun or mode == "MULTIRUN":
        if not sweeps:
            raise UserError(f"{Path(sys.argv[0]).name} takes one config at a time: leave out -m")
        return
    for line, override in zip(args.overrides, overrides, strict=True):
        if override.is_sweep_override():
            listed = f"{override.key_or_group}=[{override.get_value_string()}]"
            if not sweeps:
                raise UserError(f"{line} gives several values: give one, or a list as {listed}")
            remedy = f"write a list as {listed}" if override.key_or_group in _list_keys() else "add -m"
            raise UserError(f"{line} asks for several runs: {remedy}, or quote the value")
        # hydra.mode=RUN asks for the one run that its file describes
        if override.key_or_group == SWEEPS and override.value() is not None and not (mode or args.cfg):
            raise UserError(f"{line} asks for several runs: add -m")


def _list_keys() -> set[str]:
    return {key for key, kind, _ in every_key() if accepts([], kind) and not accepts({}, kind)}


def _mode(overrides: Iterable[Override]) -> str | None:
    return next((str(o.value()) for o in overrides if o.key_or_group == "hydra.mode"), None)


def _is_dry(overrides: Iterable[Override]) -> bool:
    given = [override for override in overrides if override.key_or_group == "dry_run"][-1:]
    for override in given:
        if not isinstance(override.value(), bool):
            raise UserError(f"{override.input_line} must be true or false")
    return any(override.value() for override in given)


def check_overrides(overrides: Iterable[Override], catalogue: Catalogue) -> None:
    """Check overrides, and the named sweep that they choose, against the YAML files.

    Raises:
        UserError: for a group, an option, a key or a kind of value that the files do not have.
    """
    every = [*overrides]
    own = [override for override in every if not override.is_hydra_override()]
    for override in own:
        _check_options(override, catalogue)
    chosen = {o.key_or_group: _options(o, catalogue) for o in own if o.key_or_group in catalogue.options}
    choices = catalogue.default_choices()
    for group, options in choices.items():
        if options == [MISSING] and not chosen.get(group):
            raise UserError(f"give {group}=NAME: {group} has {', '.join(catalogue.options[group])}")
    sweeps = chosen.get(SWEEPS, choices.get(SWEEPS, []))
    check_hydra(every, catalogue, sweeps[0] if sweeps else None)
    for sweep in sweeps:
        choices |= _known_choices(sweep, catalogue)
    params, arms = _grid(every, catalogue, sweeps)
    for override in [*params, *(override for arm in arms for override in arm)]:
        _check_options(override, catalogue)
    for arm in arms:
        of_arm = choices | _chosen(params, catalogue) | _chosen(arm, catalogue)
        keys = catalogue.keys(of_arm) | catalogue.keys(of_arm | chosen)
        for override in arm:
            _check_key(override, keys, catalogue)
    swept = _chosen([*params, *(override for arm in arms for override in arm)], catalogue)
    keys = catalogue.keys(choices | swept | chosen)
    for override in [*params, *own]:
        _check_key(override, keys, catalogue)
    for sweep in sweeps:
        for key, value in catalogue.option_keys(SWEEPS, sweep).items():
            _check_value(key, value, f"sweeps={sweep}", keys, catalogue)


def _grid(
    overrides: Iterable[Override], catalogue: Catalogue, sweeps: Sequence[str]
) -> tuple[list[Override], list[list[Override]]]:
    """Return what a sweep varies, and its arms, by the named sweep and the command line."""
    settings = catalogue.sweeper(sweeps[0])[1] if sweeps else {}
    params, arms = sweeper_lines(overrides, settings.get("params") or {}, settings.get("arms") or [])
    parser = OverridesParser.create()
    return (
        spans.parse(params, integer_keys(), parser),
        [spans.parse(split_arm(arm), integer_keys(), parser) for arm in arms],
    )


def _chosen(overrides: Iterable[Override], catalogue: Catalogue) -> dict[str, list[str]]:
    """Return the options that overrides choose, by group; several of one group, as those of arms, add up."""
    chosen: dict[str, list[str]] = defaultdict(list)
    for override in overrides:
        if override.key_or_group in catalogue.options:
            chosen[override.key_or_group] += _options(override, catalogue)
    return dict(chosen)


def _known_choices(sweep: str, catalogue: Catalogue) -> dict[str, list[str]]:
    """Return the options that a named sweep chooses in its defaults list; `UserError` for one that there is not."""
    choices = catalogue.sweep_choices(sweep)
    for group, options in choices.items():
        available = catalogue.options.get(group, {})
        for option in options:
            if option not in available:
                raise UserError(f"sweeps={sweep}: {group} has no option {option}{nearest(option, available)}")
    return choices


def _check_options(override: Override, catalogue: Catalogue) -> None:
    group = override.key_or_group
    if override.package is not None:
        raise UserError(f"{override.input_line}: a group's place in the config is fixed; leave out the @")
    if group not in catalogue.options:
        return
    available = catalogue.options[group]
    options = _options(override, catalogue)
    for option in options:
        if option not in available:
            raise UserError(_no_option(str(override.input_line), group, option, available))
    if not options and not override.is_delete():
        raise UserError(f"{override.input_line} chooses nothing: {group} has {', '.join(available)}")
    for choice in _values(override) if group in UNTYPED else ():
        names = choice if isinstance(choice, list) else []
        parts = Counter(part for name in names for part in catalogue.parts(group, str(name)))
        for part, count in parts.items():
            if count > 1:  # Hydra would merge them into one in silence
                raise UserError(f"{override.input_line} names {part} twice: once is enough")


def _no_option(line: str, group: str, option: str, available: Mapping[str, Any]) -> str:
    """Return what is wrong with an option that there is not, and what may have been meant."""
    parts = TOGETHER.split(option)
    if len(parts) > 1 and all(part in available for part in parts):
        together = f", or {group}=[{','.join(parts)}] to choose them together" if group in UNTYPED else ""
        return f"{line}: write -m {group}={','.join(parts)} to compare them{together}"
    key = meant(group, [key for key, _, _ in every_key()])
    if key and option.isdecimal():
        return f"{line}: {group} is a group of options; did you mean {key}={option}?"
    if group == "data" and ("." in option or "/" in option):
        return f"{line}: {group} is a group of options; did you mean data=files data.files={option}?"
    return f"{line}: {group} has no option {option}{nearest(option, available)} (there is {', '.join(available)})"


def _options(override: Override, catalogue: Catalogue) -> list[str]:
    """Return the names of the options that a group override chooses, each once."""
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
    """Return the values that an override gives its key: one, those of a sweep, or an interval's two ends."""
    value = override.value()
    if not isinstance(value, Sweep):
        return [value]
    if isinstance(value, IntervalSweep):
        return [value.start, value.end]
    return [item.text if isinstance(item, QuotedString) else item for item in override.sweep_iterator()]


def _check_key(override: Override, keys: dict[str, Any], catalogue: Catalogue) -> None:
    name, line = override.key_or_group, str(override.input_line)
    if override.is_add() or override.is_force_add():
        if name.rpartition(".")[0] in open_keys() and (name not in keys or override.is_force_add()):
            return  # the schema checks the value
        hint = nearest(name, [*keys, *catalogue.options])
        raise UserError(f"{line} would add a key, but every key there is exists already{hint}")
    if name in catalogue.options:
        return
    if "/" in name:
        raise UserError(f"{line}: there is no group {name}{nearest(name, catalogue.options)}")
    if override.is_delete():
        _check_known(name, line, keys, catalogue)
        if name.partition(".")[0] in UNTYPED and name in keys:
            raise UserError(f"{line} deletes a key that {name.rpartition('.')[0]} needs: give it a value")
        return
    for value in _values(override):
        for key, leaf in flatten({name: value}).items():
            _check_value(key, leaf, line, keys, catalogue)


def _check_value(key: str, value: Any, line: str, keys: dict[str, Any], catalogue: Catalogue) -> None:
    """Check that the key exists, and for a key without a typed schema that the value is of its YAML file's kind."""
    _check_known(key, line, keys, catalogue)
    default = keys.get(key)
    switch = isinstance(default, bool)
    # only the program that has sweeps has a schema for the keys of its root
    untyped = key.partition(".")[0] in UNTYPED or (switch and "." not in key and SWEEPS not in catalogue.options)
    if untyped and default is not None and _kind(value) != _kind(default):
        example = "" if switch or default == "" else f", such as {default}"
        raise UserError(f"{line}: {key} must be {_kind(default)}{example}")


def _check_known(key: str, line: str, keys: dict[str, Any], catalogue: Catalogue) -> None:
    if any(f"{known}.".startswith(f"{key}.") for known in keys):
        return
    if owner := _owner(key, catalogue):
        raise UserError(f"{line}: {key} belongs to {owner}, which is not chosen: give {owner}")
    there = [*keys, *catalogue.options, *(ELSEWHERE if SWEEPS in catalogue.options else [])]
    other = None if meant(key, there) else meant(key, [name for name, _, _ in every_key()])
    if other and (owner := _owner(other, catalogue)):
        raise UserError(f"{line}: there is no key {key}; did you mean {owner} {other}=...?")
    raise UserError(f"{line}: there is no key {key}{nearest(key, there)}")


def _owner(key: str, catalogue: Catalogue) -> str | None:
    """Return the `group=option` that has a key; of several the one whose name is in the key."""
    owners = [
        (option not in key.split("."), f"{group}={option}")
        for group, options in catalogue.options.items()
        for option in options
        if group != SWEEPS and key in catalogue.option_keys(group, option)
    ]
    return min(owners, key=lambda owner: owner[0])[1] if owners else None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        try:
            float(value)  # YAML 1.1 reads 1e-3 as text, Hydra as a number
        except ValueError:
            return "text"
    return "a number" if isinstance(value, int | float | str) else type(value).__name__

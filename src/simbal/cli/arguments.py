"""Checks the arguments of a program before Hydra reads them, and writes out their spans.

An unknown name is an error that says what was meant: Hydra composes without structured configs, so that
`+balancing.simbal.coeff=3` would pass it in silence, and what it does refuse it refuses without naming what is near.
Keys of `hydra.sweeper` are checked against `SearchSettings`.
"""

import difflib
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_origin

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, Sweep
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from simbal.cli.again import begun_from, run_of
from simbal.config.catalogue import MISSING, SWEEPS, Catalogue
from simbal.config.schema import integer_keys, open_keys
from simbal.config.values import flatten, words
from simbal.errors import UserError
from simbal.runs.spec import RunSpec
from simbal.sweep import spans
from simbal.sweep.search.settings import SearchSettings

PACKAGES = {"joblib": "hydra_joblib_launcher", "slurm": "hydra_submitit_launcher", "ray": "hydra_ray_launcher"}
EXTRAS = {
    "joblib": "joblib", "slurm": "slurm", "submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray",
    "ray_cluster": "ray",
}  # fmt: skip
UNTYPED = ("balancing", "analysis")  # groups whose options are classes and functions: no dataclass knows their keys
NAME = "optuna"
PREFIX = "hydra.sweeper."
TYPES = {f.name: f.type for f in fields(SearchSettings)}


def checked_arguments(catalogue: Catalogue) -> list[str] | RunSpec:
    """Return what Hydra is told instead of `sys.argv[1:]`: the same with its spans written out, and flags first.

    Returns:
        The arguments; or the run at `run=`, which needs no Hydra.

    Raises:
        UserError: for a name that is not in `catalogue`, and for flags and values that make no sense together.
    """
    args = get_args_parser().parse_intermixed_args()  # -m may stand anywhere
    if args.shell_completion or args.hydra_help:
        return sys.argv[1:]
    given = spans.parse(args.overrides, integer_keys(), OverridesParser.create())
    trains = SWEEPS in catalogue.options
    if trains and (run := run_of(given, catalogue)):
        if args.multirun or args.cfg:
            raise UserError("run= goes on with one run: leave out -m and --cfg")
        return run
    overrides = begun_from(given, catalogue) if trains else given
    check_overrides(overrides, catalogue)
    check_launcher(overrides)
    _check_mode(args, given, sweeps=trains)
    flags = [argument for argument in sys.argv[1:] if argument not in args.overrides]
    return [*flags, *(str(override.input_line) for override in overrides), *_sweeper(overrides, catalogue)]


def check_launcher(overrides: Iterable[Override]) -> None:
    """Raise `UserError` if the launcher that the overrides choose is not installed."""
    for override in overrides:
        extra = EXTRAS.get(str(override.value())) if override.key_or_group == "hydra/launcher" else None
        if extra and find_spec(f"hydra_plugins.{PACKAGES[extra]}") is None:
            raise UserError(f"{override.input_line} is not installed: pip install 'simbal[{extra}]'")


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
    mode = next((str(o.value()) for o in overrides if o.key_or_group == "hydra.mode"), None)
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
            remedy = "add -m" if sweeps else "write a list as [a,b]"
            raise UserError(f"{line} asks for several runs: {remedy}, or quote the value")
        # hydra.mode=RUN asks for the one run that its file describes
        if override.key_or_group == SWEEPS and override.value() is not None and not (mode or args.cfg):
            raise UserError(f"{line} asks for several runs: add -m")


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
    for sweep in sweeps or [""]:
        check_sweeper_keys(every, f"sweeps={sweep}", *(catalogue.sweeper(sweep) if sweep else (None, {})))
    lines = [line for sweep in sweeps for line in catalogue.sweep_lines(sweep)]
    grid = spans.parse(lines, integer_keys(), OverridesParser.create())
    for override in grid:
        _check_options(override, catalogue)
    for sweep in sweeps:
        choices |= _known_choices(sweep, catalogue)
    swept: dict[str, list[str]] = defaultdict(list)
    for override in grid:  # arms may choose different options of a group
        if override.key_or_group in catalogue.options:
            swept[override.key_or_group] += _options(override, catalogue)
    choices |= swept
    keys = catalogue.keys(choices | chosen)
    for override in [*grid, *own]:
        _check_key(override, keys, catalogue)
    for sweep in sweeps:
        for key, value in catalogue.option_keys(SWEEPS, sweep).items():
            _check_value(key, value, f"sweeps={sweep}", keys, catalogue)


def _known_choices(sweep: str, catalogue: Catalogue) -> dict[str, list[str]]:
    """Return the options that a named sweep chooses in its defaults list; `UserError` for one that there is not."""
    choices = catalogue.sweep_choices(sweep)
    for group, options in choices.items():
        available = catalogue.options.get(group, {})
        for option in options:
            if option not in available:
                raise UserError(f"sweeps={sweep}: {group} has no option {option}{_nearest(option, available)}")
    return choices


def check_sweeper_keys(overrides: Iterable[Override], sweep: str, chosen: str | None, keys: dict[str, Any]) -> None:
    """Check the overrides of `hydra.sweeper`, and what a named sweep sets of it.

    Args:
        overrides: the command line's.
        sweep: the named sweep as it is chosen, such as `sweeps=significance`; "" without one.
        chosen: the sweeper that it chooses, if it does.
        keys: what it sets of `hydra.sweeper`.

    Raises:
        UserError: for an unknown key, or a value of the wrong kind; the sentence says what there is.
    """
    own = [*overrides]
    sweepers = [str(override.value()) for override in own if override.key_or_group == "hydra/sweeper"]
    if [*filter(None, [chosen]), *sweepers][-1:] != [NAME]:
        return
    for key, value in keys.items():
        _check(key, value, f"{sweep}: {PREFIX}{key}", f"{sweep}: {PREFIX}{key}={value}")
    for override in own:
        key = override.key_or_group
        if key.startswith(PREFIX) and not override.is_delete():
            _check(key.removeprefix(PREFIX), override.value(), key, str(override.input_line))


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
            raise UserError(
                f"{override.input_line}: {group} has no option {option}{_nearest(option, available)} "
                f"(there is {', '.join(available)})"
            )
    if not options and not override.is_delete():
        raise UserError(f"{override.input_line} chooses nothing: {group} has {', '.join(available)}")
    for choice in _values(override) if group in UNTYPED else ():
        names = choice if isinstance(choice, list) else []
        parts = Counter(part for name in names for part in catalogue.parts(group, str(name)))
        for part, count in parts.items():
            if count > 1:  # Hydra would merge them into one in silence
                raise UserError(f"{override.input_line} names {part} twice: once is enough")


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
        hint = _nearest(name, [*keys, *catalogue.options])
        raise UserError(f"{line} would add a key, but every key there is exists already{hint}")
    if name in catalogue.options:
        return
    if "/" in name:
        raise UserError(f"{line}: there is no group {name}{_nearest(name, catalogue.options)}")
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
    if key.partition(".")[0] in UNTYPED and default is not None and _kind(value) != _kind(default):
        example = f", such as {default}" if default != "" else ""
        raise UserError(f"{line}: {key} must be {_kind(default)}{example}")


def _check_known(key: str, line: str, keys: dict[str, Any], catalogue: Catalogue) -> None:
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
    """Return `; did you mean a or b?`, the likeliest first, or nothing."""
    likeness = {candidate: _likeness(name, candidate) for candidate in candidates}
    best = max(likeness.values(), default=0.0)
    likely = sorted((c for c in likeness if likeness[c] >= max(0.6, 0.9 * best)), key=lambda c: -likeness[c])
    return f"; did you mean {' or '.join(likely[:3])}?" if likely else ""


def _likeness(name: str, candidate: str) -> float:
    """Return how alike two dotted names are, 0 to 1.

    It is the mean over the whole names and their last parts, of which one may be a word of the other.
    """
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    last, other = name.rpartition(".")[2], candidate.rpartition(".")[2]
    if last in other.split("_") or other in last.split("_"):
        return (whole + 1) / 2
    return (whole + difflib.SequenceMatcher(None, last, other).ratio()) / 2


def _check(key: str, value: Any, place: str, line: str) -> None:
    name = key.partition(".")[0]
    if name not in TYPES:
        raise UserError(f"{place}: there is no such key; {PREFIX[:-1]} has {', '.join(TYPES)}")
    if key != name:  # a key of params, which the grammar of overrides checks
        return
    said = place if name == "storage" else line  # the line may hold a password
    settings = OmegaConf.structured(SearchSettings)
    try:
        settings[name] = value
        OmegaConf.to_container(settings, resolve=True)
    except InterpolationResolutionError as error:
        raise UserError(f"{said}: {str(error).splitlines()[0]}") from None
    except OmegaConfBaseException:
        kind = "a list such as [a,b]" if get_origin(TYPES[name]) is list else words(TYPES[name])
        raise UserError(f"{said}: {PREFIX}{name} must be {kind}") from None

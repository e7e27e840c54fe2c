"""Starts a program from its command line: answers `--help`, rewrites a few arguments, and leaves the rest to Hydra."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from simbal.commands import as_typed
from simbal.errors import ConfigError, exit_codes, exit_on_user_error

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from simbal.runs.spec import RunSpec

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's variable: raise instead of printing
PACKAGES = {"ray": "ray", "slurm": "submitit"}  # of launchers, which extras of the same name install
OPEN = ("balancing", "data", "logger")  # groups whose options have different keys


def run(
    main: Callable[[Any], None],
    about: str | None,
    argv: list[str],
    root: str = "config",
    again: Callable[["RunSpec"], None] | None = None,
) -> None:
    """Call `main` with the config that `argv` describes, or with each config of a sweep, as `hydra.main` does.

    A mistake in `argv` or in a config file is one sentence and exit code 2; with HYDRA_FULL_ERROR=1 it is a traceback.

    Args:
        main: takes the composed config.
        about: what the program does, and examples; it opens the help page.
        argv: the arguments of the command line.
        root: the root config, Hydra's `config_name`.
        again: is called instead with the run that `run=` names, if the program trains.
    """
    if {"-h", "--help"} & {*argv}:
        from simbal.cli.help import help_page

        print(as_typed(help_page(about or "", root, [word for word in argv if not word.startswith("-")])))
        return
    from simbal.config.messages import raise_config_errors

    before = os.environ.get(FULL_ERROR)
    if before == "1":
        with exit_codes():
            _start(main, argv, root, again)
        return
    os.environ[FULL_ERROR] = "1"  # Hydra raises, so that its errors can be translated
    try:
        with exit_codes(), exit_on_user_error(), raise_config_errors(argv):
            _start(main, argv, root, again)
    finally:
        os.environ.pop(FULL_ERROR)


def _start(main: Callable[[Any], None], argv: list[str], root: str, again: Callable[["RunSpec"], None] | None) -> None:
    found = hydra_arguments(argv, root)
    if sys.stderr.isatty() and not any(word.startswith("-") for word in argv):  # a sweep has its own first line
        print("starting ...", file=sys.stderr)  # torch takes seconds
    if not isinstance(found, list):
        assert again
        again(found)
        return
    import hydra

    from simbal.config.options import CONF

    sys.argv[1:] = found
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=root)(main)()


def hydra_arguments(argv: Sequence[str], root: str) -> "list[str] | RunSpec":
    """Return the arguments for Hydra: spans are expanded, `from=` is replaced; or the run that `run=` names.

    Raises:
        ConfigError: flags, spans or folders that make no sense.
        OverrideParseException: an argument is not in Hydra's grammar.
    """
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from simbal.cli.again import begun_from, folder_of, run_of
    from simbal.config import spans
    from simbal.config.options import conf_here, options, sweeper_of, sweeps_here
    from simbal.config.schema import integer_keys

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would print its usage
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise ConfigError(_no_flag(unknown[0]))
    if args.shell_completion or args.hydra_help:
        return [*argv]
    for group in ["", *(path.name for path in [*sweeps_here(), *(p for c in conf_here() for p in c.iterdir())])]:
        options(group)  # refuses a file that is never read
    overrides = spans.parse(args.overrides, integer_keys(), OverridesParser.create())
    given = {override.key_or_group: override for override in overrides}
    flags = [word for word in argv if word not in args.overrides]
    multirun = args.multirun or ("hydra.mode" in given and given["hydra.mode"].value() == "MULTIRUN")
    if root != "config":
        if multirun:
            raise ConfigError(f"{root}.py takes one config at a time: leave out -m")
        return [*flags, *(str(override.input_line) for override in overrides)]
    if folder := folder_of("run", overrides):
        if multirun or args.cfg or "dry_run" in given:
            raise ConfigError("run= continues one run: leave out -m, --cfg and dry_run=")
        return run_of(folder, overrides)
    if "dry_run" in given and given["dry_run"].value() is True and not (multirun or args.cfg):
        multirun, flags = True, [*flags, "-m"]  # a dry run of one run is that of a sweep of one
    if folder := folder_of("from", overrides):
        overrides = spans.parse(begun_from(folder, overrides), integer_keys(), OverridesParser.create())
    launcher = str(given["hydra/launcher"].value()) if "hydra/launcher" in given else ""
    if launcher in PACKAGES and find_spec(PACKAGES[launcher]) is None:
        raise ConfigError(f"hydra/launcher={launcher} is not installed: pip install 'simbal[{launcher}]'")
    sweep = given["sweeps"].value() if "sweeps" in given else None
    if sweep and not (multirun or args.cfg or "hydra.mode" in given):
        raise ConfigError(f"sweeps={sweep} asks for several runs: add -m")
    lines = [deferred(override) if multirun else str(override.input_line) for override in overrides]
    sweeper = sweeper_of(str(sweep)) if sweep and "hydra/sweeper" not in given else None
    # the root config's choice of a sweeper would win over that of a named sweep
    return [*flags, *lines, *([f"hydra/sweeper={sweeper}"] if sweeper else [])]


def deferred(override: "Override") -> str:
    """Return `balancing.lbl.coef=1` as `balancing.lbl.coef=choice(1)`, which Hydra leaves to the sweeper.

    Hydra would set it before it calls the sweeper, in a config with the default option, which has no such key.
    """
    line, group = str(override.input_line), override.key_or_group.partition(".")[0]
    plain = override.type.name == "CHANGE" and not override.is_sweep_override()
    if plain and group in OPEN and "." in override.key_or_group:
        return f"{override.get_key_element()}=choice({override.get_value_string()})"
    return line


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}: --help lists the flags")


def _no_flag(flag: str) -> str:
    """Return what to write in place of `--seed 1` or `--sed=1`."""
    from simbal.config.messages import all_keys, closest

    name = flag.partition("=")[0]
    key = name.lstrip("-").replace("-", "_")
    hint = f"; did you mean {key}=?" if key in all_keys() else closest(key, all_keys())
    return f"there is no flag {name}{hint or '.'} Keys are given as key=value, without dashes"

"""Starts a program from its command line: prints `--help`, rewrites a few arguments and leaves the rest to Hydra."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from simbal.commands import format_command
from simbal.errors import ConfigError, exit_on_user_error

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from simbal.runs.spec import RunSpec

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's variable: raise errors instead of printing them
PACKAGES = {"ray": "ray", "slurm": "submitit"}  # of launchers, installed by extras of the same name
OPEN_GROUPS = ("balancing", "data", "logger")  # groups whose options have different keys


def run(
    main: Callable[[Any], None],
    about: str | None,
    argv: list[str],
    root: str = "config",
    resume: Callable[["RunSpec"], None] | None = None,
) -> None:
    """Call `main` with the config that `argv` describes, or with each config of a sweep, as `hydra.main` does.

    An error in `argv` or in a config file prints one sentence and exits with 2; HYDRA_FULL_ERROR=1 shows a traceback.

    Args:
        main: a function of the composed config.
        about: a summary and examples for the top of the help page.
        argv: the arguments of the command line.
        root: the root config, Hydra's `config_name`.
        resume: called instead of `main`, with the run that `run=` selects.
    """
    if {"-h", "--help"} & {*argv}:
        from simbal.cli.help import help_page

        print(format_command(help_page(inspect.cleandoc(about or ""), root, argv)))
        return
    from simbal.config.messages import raise_config_errors

    full_error = os.environ.get(FULL_ERROR)
    with ExitStack() as stack:
        if full_error != "1":
            os.environ[FULL_ERROR] = "1"  # Hydra must raise its errors, so that they can be described
            stack.callback(os.environ.pop, FULL_ERROR)
            stack.enter_context(exit_on_user_error())
            stack.enter_context(raise_config_errors(argv))
        arguments = hydra_arguments(argv, root)
        if sys.stderr.isatty() and not any(word.startswith("-") for word in argv):  # a sweep prints its own first line
            print("starting ...", file=sys.stderr)  # importing torch takes seconds
        if not isinstance(arguments, list):
            assert resume
            resume(arguments)
            return
        import hydra

        from simbal.config.options import CONF

        sys.argv[1:] = arguments
        task = main if full_error == "1" else exit_on_user_error()(main)
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=root)(task)()


def hydra_arguments(argv: Sequence[str], root: str) -> "list[str] | RunSpec":
    """Return the arguments for Hydra, with spans expanded and `from=` replaced, or the run that `run=` selects.

    Raises:
        ConfigError: an unknown flag, an invalid span, or arguments that contradict each other.
        OverrideParseException: an argument does not follow Hydra's grammar.
    """
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from simbal.cli.resume import find_folder, overrides_from, run_to_resume
    from simbal.config import spans
    from simbal.config.options import check_options_here, sweeper_of
    from simbal.config.schema import integer_keys

    parser = get_args_parser()
    parser.error = _raise_flag_error  # type: ignore[method-assign]  # argparse would print its usage
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise ConfigError(_describe_unknown_flag(unknown[0]))
    if args.shell_completion or args.hydra_help:
        return [*argv]
    check_options_here()
    overrides = spans.parse(args.overrides, integer_keys(), OverridesParser.create())
    given = {override.key_or_group: override.value() for override in overrides}
    flags = [word for word in argv if word not in args.overrides]
    multirun = args.multirun or given.get("hydra.mode") == "MULTIRUN"
    if root != "config":
        if multirun:
            raise ConfigError(f"{root}.py takes one config at a time: leave out -m")
        return [*flags, *(str(override.input_line) for override in overrides)]
    if folder := find_folder("run", overrides):
        if multirun or args.cfg or "dry_run" in given:
            raise ConfigError("run= resumes one run: leave out -m, --cfg and dry_run=")
        return run_to_resume(folder, overrides)
    if given.get("dry_run") is True and not (multirun or args.cfg):
        multirun, flags = True, [*flags, "-m"]  # a dry run is a feature of sweeps
    if folder := find_folder("from", overrides):
        overrides = spans.parse(overrides_from(folder, overrides), integer_keys(), OverridesParser.create())
    launcher, sweep = str(given.get("hydra/launcher")), given.get("sweeps")
    if launcher in PACKAGES and find_spec(PACKAGES[launcher]) is None:
        raise ConfigError(f"hydra/launcher={launcher} is not installed: pip install 'simbal[{launcher}]'")
    if sweep and not (multirun or args.cfg or "hydra.mode" in given):
        raise ConfigError(f"sweeps={sweep} defines several runs: add -m")
    lines = [defer(override) if multirun else str(override.input_line) for override in overrides]
    # otherwise the root config's sweeper would override the sweeper of the named sweep
    sweeper = sweeper_of(str(sweep)) if sweep and "hydra/sweeper" not in given else None
    return [*flags, *lines, *([f"hydra/sweeper={sweeper}"] if sweeper else [])]


def defer(override: "Override") -> str:
    """Return `balancing.lbl.coef=1` as `balancing.lbl.coef=choice(1)`, which Hydra leaves to the sweeper.

    Hydra would set the key before it calls the sweeper, in a config whose default option lacks the key.
    """
    is_plain = override.type.name in ("CHANGE", "FORCE_ADD") and not override.is_sweep_override()
    group, _, key = override.key_or_group.partition(".")
    if is_plain and group in OPEN_GROUPS and key:
        return f"{override.get_key_element()}=choice({override.get_value_string()})"
    return str(override.input_line)


def _raise_flag_error(message: str) -> NoReturn:
    raise ConfigError(f"{message}: --help lists the flags")


def _describe_unknown_flag(flag: str) -> str:
    from simbal.config.messages import all_keys, suggest

    name = flag.partition("=")[0]
    key = name.lstrip("-").replace("-", "_")
    hint = f"; did you mean {key}=?" if key in all_keys() else suggest(key, all_keys())
    return f"there is no flag {name}{hint or '.'} Keys are given as key=value, without dashes"

"""The command line before and around Hydra: spans, misspelt names, `--help` and exit codes."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from simbal.catalogue import SWEEPS, Catalogue
from simbal.config import integer_keys
from simbal.errors import UserError
from simbal.overrides import check_overrides
from simbal.sweep import spans
from simbal.sweep.launcher_extras import check_launcher

BAD_USAGE = 2  # the exit code of a command line that names something that is not there
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as in a shell


def check(conf: Path, about: str, root: str = "config") -> None:
    """Write out the spans in `sys.argv`, or print the page of `--help` and stop.

    A name that is not in the folder `conf` stops the program with one sentence and exit code 2.

    Args:
        conf: the folder that Hydra's `config_path` names.
        about: what the program does, and examples; it opens the help page.
        root: the root config, Hydra's `config_name`; the groups of its defaults list are those there are.
    """
    args = get_args_parser().parse_intermixed_args()  # -m may stand anywhere
    if args.shell_completion or args.hydra_help:
        return
    try:
        catalogue = _catalogue(args, conf, root)
        if args.help:
            from simbal.help_page import help_page

            print(help_page(about, catalogue))
            raise SystemExit(0)
        overrides = spans.parse(args.overrides, integer_keys(), OverridesParser.create())
        check_overrides(overrides, catalogue)
        check_launcher(overrides)
        _check_mode(args, overrides, sweeps=SWEEPS in catalogue.options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_USAGE) from None
    flags = [argument for argument in sys.argv[1:] if argument not in args.overrides]
    lines = [*(str(override.input_line) for override in overrides), *_sweeper(overrides, catalogue)]
    sys.argv[1:] = [*flags, *lines]  # Hydra wants flags in one place


@contextmanager
def exit_codes() -> Iterator[None]:
    """Make an interrupted program exit with 130 and a terminated one with 143.

    Lightning turns SIGTERM into a `SystemExit` without a code, which would be 0, success; and Ctrl-C into 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED) from None
        if end.code is None:
            raise SystemExit(TERMINATED) from None
        raise


def _catalogue(args: Namespace, conf: Path, root: str) -> Catalogue:
    folders = [conf.parent / args.config_path if args.config_path else conf]
    if args.config_dir:
        folders.append(Path(args.config_dir))
    return Catalogue(folders, args.config_name or root)


def _sweeper(overrides: list[Override], catalogue: Catalogue) -> list[str]:
    """The sweeper that a named sweep chooses, as an override: in a defaults list the root config's choice would win."""
    given = {override.key_or_group: override.value() for override in overrides}
    sweep = given.get(SWEEPS)
    chosen = catalogue.sweeper(str(sweep))[0] if sweep and "hydra/sweeper" not in given else None
    return [f"hydra/sweeper={chosen}"] if chosen else []


def _check_mode(args: Namespace, overrides: list[Override], *, sweeps: bool) -> None:
    """`sweeps`: whether the program has named sweeps; one that has none takes one config at a time."""
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
        # A job of a sweep is told the sweep's name, and hydra.mode=RUN with it.
        if override.key_or_group == SWEEPS and override.value() is not None and not (mode or args.cfg):
            raise UserError(f"{line} asks for several runs: add -m")

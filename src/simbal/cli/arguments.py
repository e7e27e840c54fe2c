"""Checks the arguments of a program before Hydra reads them, and writes out their spans."""

import sys
from argparse import Namespace
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from simbal.cli.again import begun_from, run_of
from simbal.cli.overrides import check_overrides
from simbal.config.catalogue import SWEEPS, Catalogue
from simbal.config.schema import integer_keys
from simbal.errors import UserError
from simbal.runs.spec import RunSpec
from simbal.sweep import spans

PACKAGES = {"joblib": "hydra_joblib_launcher", "slurm": "hydra_submitit_launcher", "ray": "hydra_ray_launcher"}
EXTRAS = {
    "joblib": "joblib", "slurm": "slurm", "submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray",
    "ray_cluster": "ray",
}  # fmt: skip


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

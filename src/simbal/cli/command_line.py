"""Starts a program by its command line: `--help` is answered at once, everything else is checked and left to Hydra.

Hydra takes most of the time that `--help` may take, so that it is imported afterwards.
"""

import re
import sys
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simbal.commands import as_typed
from simbal.config.catalogue import CONF, MISSING, SWEEPS, Catalogue, conf_here, first_comment, sweeps_here
from simbal.errors import UserError, exit_codes

if TYPE_CHECKING:
    from simbal.runs.spec import RunSpec

BAD_USAGE = 2  # the exit code of a command line that names something that is not there
HELP = {"-h", "--help", "--hel", "--he"}  # as argparse abbreviates them
FOLDERS = (("--config-path", "-cp"), ("--config-dir", "-cd"), ("--config-name", "-cn"), ("--cfg", "-c"))
_KEY_LINE = re.compile(r"(\w+): *([^#\s]*)\s*(?:# *(.*))?")
SWEEP_FLAG = ("-m", "run every combination of the values given: seed=0-4, balancing=simbal,lbl")
FLAGS = (
    ("--cfg job", "print the config that the overrides compose to, and run nothing"),
    ("--hydra-help", "Hydra's own flags"),
)


def run(
    main: Callable[[Any], None],
    about: str | None,
    argv: list[str],
    root: str = "config",
    again: Callable[["RunSpec"], None] | None = None,
) -> None:
    """Call `main` with the config that `argv` describes, or with each of a sweep, as `hydra.main` does.

    Args:
        main: what is called, in a module that Hydra calls the job by.
        about: what the program does, and examples; it opens the help page.
        argv: the arguments of the command line; Hydra reads those of `sys.argv`, which are made the same.
        root: the root config, Hydra's `config_name`.
        again: what is called instead with the run that `run=` names, if the program trains.
    """
    sys.argv[1:] = argv
    named = check(CONF, about or "", root)
    if sys.stderr.isatty() and not any(word.startswith("-") for word in sys.argv[1:]):  # a sweep has its own first line
        print("starting ...", file=sys.stderr)  # torch takes seconds
    if named is not None and again is not None:
        with exit_codes():
            again(named)
        return
    import hydra

    with exit_codes():
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=root)(main)()


def check(conf: Path, about: str, root: str = "config") -> "RunSpec | None":
    """Write out the spans in `sys.argv`, or print the page of `--help` and stop.

    A name that is not in the folder `conf` stops the program with one sentence and exit code 2.

    Args:
        conf: the folder that Hydra's `config_path` names.
        about: what the program does, and examples; it opens the help page.
        root: the root config, Hydra's `config_name`; the groups of its defaults list are those there are.

    Returns:
        The run that `run=` names, for a program that trains.
    """
    try:
        catalogue = _catalogue(conf, root)
        if HELP & {*sys.argv[1:]}:
            print(as_typed(help_page(about, catalogue)))
            raise SystemExit(0)
        from simbal.cli.arguments import checked_arguments

        found = checked_arguments(catalogue)
        if not isinstance(found, list):
            return found
        sys.argv[1:] = found
        return None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_USAGE) from None


def _catalogue(conf: Path, root: str) -> Catalogue:
    """Return the catalogue of the folders and root config that Hydra's flags name.

    Without them these are `conf`, with conf/ and sweeps/ of the current folder, and `root`.

    Raises:
        UserError: the flags name the config.yaml of a run, which begins with its choices.
    """
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    for flags in FOLDERS:
        parser.add_argument(*flags)
    try:
        args, _ = parser.parse_known_args()
    except ArgumentError as error:
        raise UserError(f"{error}: --help lists what there is") from None
    folder = Path(args.config_dir or args.config_path or "")
    file = folder / "config.yaml"
    if args.config_name == "config" and file.is_file() and file.read_bytes().startswith(b"choices:"):
        # Hydra would compose another strategy than that of the run
        raise UserError(f"{folder} is a run: go on with it by run={folder}, or begin one like it by from={folder}")
    if args.config_dir and not folder.is_dir():
        raise UserError(f"--config-dir={folder}: there is no such folder")
    folders, sweeps = [conf, *conf_here()], sweeps_here()
    if args.config_path:  # instead of all others
        folders, sweeps = [Path(args.config_path)], []
    if args.config_dir:
        folders.append(Path(args.config_dir))
    return Catalogue(folders, args.config_name or root, sweeps)


def help_page(about: str, catalogue: Catalogue) -> str:
    """Return the whole page, as text; `about` opens it."""
    groups = [group for group in catalogue.default_choices() if group != SWEEPS]
    sections = [about.strip()]
    if groups:
        sections.append("Groups, overridden by group=option; * marks the default")
    sections += [_group(group, catalogue) for group in groups]
    sections.append("Keys, overridden by key=value\n" + _columns(_keys(catalogue)))
    if groups:
        sections[-1] += "\n    ... and those of the options chosen: --cfg job prints all of them"
    if catalogue.options.get(SWEEPS):
        sections.append("Named sweeps, run by -m sweeps=NAME\n" + _columns(_sweeps(catalogue)))
    sections.append("Flags\n" + _columns([SWEEP_FLAG, *FLAGS] if SWEEPS in catalogue.options else FLAGS))
    return "\n\n".join(sections)


def _group(group: str, catalogue: Catalogue) -> str:
    chosen = catalogue.default_choices()[group]
    rows = []
    for option, file in catalogue.options[group].items():
        mark = "* " if option in chosen else "  "
        rows.append((mark + option, " ".join(first_comment(file)[:1])))
    heading = f"  {group}, to be chosen: one, or several as [a,b]" if chosen == [MISSING] else f"  {group}"
    return f"{heading}\n{_columns(rows)}"


def _keys(catalogue: Catalogue) -> Iterable[tuple[str, str]]:
    for line in catalogue.root_file(catalogue.root).read_text(encoding="utf-8").splitlines():
        if (match := _KEY_LINE.fullmatch(line)) and match[2] and match[1] in catalogue.root_keys():
            yield f"{match[1]}={match[2]}", match[3] or ""


def _sweeps(catalogue: Catalogue) -> Iterable[tuple[str, str]]:
    for name, file in catalogue.options[SWEEPS].items():
        for number, line in enumerate(first_comment(file)):
            yield "" if number else name, line


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"    {left:<{width}}  {right}".rstrip() for left, right in rows)

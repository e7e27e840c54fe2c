"""List runs: how each ended, its loss, when, how long it took, and the room it takes on the disk.

Examples:
    simbal runs                                        # all below outputs/
    simbal runs outputs/default --sort loss --limit 5  # the best five of a sweep
    simbal runs --json                                 # for scripts: all that is known of each run
    simbal runs delete RUN ...

A status is finished, failed, diverged, pruned, killed, running, unfinished or damaged.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from simbal.errors import UserError, exit_on_user_error

OUTPUTS = Path("outputs")
SHORT = {"loss": "val/loss", "ppl": "val/ppl"}


def main(argv: list[str]) -> None:
    """List runs, or delete some."""
    if argv[:1] == ["delete"]:
        delete(argv[1:])
    else:
        show(argv)


def show(argv: list[str]) -> None:
    """List runs as a command line asks."""
    parser = ArgumentParser(prog="simbal runs", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[OUTPUTS], help="by default outputs/")
    parser.add_argument(
        "--sort", metavar="NAME", help="loss, ppl or another key of --json, smallest first; by default by time"
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--limit", type=int, metavar="N", help="list the first N alone")
    parser.add_argument("--json", action="store_true", help="print all that is known of them, for scripts")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        if args.limit is not None and args.limit < 1:
            raise UserError(f"--limit {args.limit} must be at least 1")
        from simbal.report.runs import list_runs

        found = [listed.values for listed in list_runs(args.folders)]
        ordered = _sorted(found, args.sort, args.reverse)
        shown = ordered[: args.limit]
        from simbal.console import console

        if args.json:
            try:
                print(json.dumps(shown, indent=1), flush=True)
            except BrokenPipeError:  # its reader, such as head, has read enough
                console().on_broken_pipe()
            return
        if not shown:
            print("no runs")
            return
        from simbal.report.runs import print_runs

        print_runs(shown, len(ordered) - len(shown), console())


def delete(argv: list[str]) -> None:
    """Delete runs, after a question."""
    parser = ArgumentParser(prog="simbal runs delete", description="Delete folders of runs, and nothing else.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="outputs/<name>/<run>, or outputs/<name>")
    parser.add_argument("--yes", action="store_true", help="do not ask, as a script must say")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        from rich.filesize import decimal

        from simbal.report.runs import size_on_disk
        from simbal.runs.folder import delete_runs, run_folders

        runs = run_folders(args.runs)
        if not args.yes and not _agreed(runs, decimal(sum(map(size_on_disk, runs)))):
            raise UserError("nothing is deleted")
        delete_runs(runs)
        print(f"deleted: {_runs(len(runs))}")


def _sorted(found: list[dict[str, Any]], name: str | None, reverse: bool) -> list[dict[str, Any]]:
    """Return runs by a value, those without it last, or else the newest first.

    Raises:
        UserError: no run has such a value.
    """
    from simbal.runs.record import is_number

    key = SHORT.get(name, name) if name else "when"
    known = dict.fromkeys(known for run in found for known in run)
    if found and key not in known:
        near = get_close_matches(key, known, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"runs have no {name}{hint}")
    without = [run for run in found if run.get(key) is None]

    def place(run: Mapping[str, Any]) -> tuple[bool, float, str]:
        value = run[key]
        return (False, value, "") if is_number(value) else (True, 0.0, str(value))

    have = [run for run in found if run.get(key) is not None]
    return sorted(have, key=place, reverse=reverse if name else not reverse) + without


def _agreed(runs: Sequence[Path], size: str) -> bool:
    """Ask whether these runs are to be deleted; `UserError` if nobody is there to answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{_runs(len(runs))} would be deleted: give --yes where nobody can be asked")
    for run in runs:
        print(f"  {run}")
    return input(f"Delete {_runs(len(runs))}, {size}? [y/N] ").strip().lower() in ("y", "yes")


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"

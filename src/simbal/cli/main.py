"""The command `simbal`: runs the subcommand named by its first argument."""

import difflib
import os
import re
import sys
from importlib import import_module, metadata
from typing import NamedTuple

from simbal.commands import NAME, STARTED_BY_NAME
from simbal.errors import BAD_USAGE, exit_codes

COMPLETION = ("-sc", "--shell-completion")  # Hydra's flag


class Program(NamedTuple):
    """A subcommand: the function that takes its arguments, a summary, and whether Hydra can complete its keys."""

    function: str
    summary: str
    uses_hydra: bool = False


PROGRAMS = {
    "train": Program("simbal.cli.train:train", "train one model, or with -m every model of a sweep", True),
    "report": Program("simbal.cli.commands:report", "print the table of a sweep or compare two sweeps"),
    "runs": Program("simbal.cli.commands:runs", "list or delete runs"),
    "evaluate": Program("simbal.cli.commands:evaluate", "run analyses of trained models", True),
    "export": Program("simbal.cli.commands:export", "export trained models to the Hugging Face format", True),
    "prepare": Program("simbal.cli.commands:prepare", "tokenize text ahead of training", True),
    "new": Program("simbal.cli.new:new", "create a project with your own strategy, config, test and sweep"),
}


def main() -> None:
    """Run the subcommand in `sys.argv`, or list all subcommands."""
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes must not import modules from the current folder
    name, *argv = sys.argv[1:] or [""]
    if name in ("", "-h", "--help"):
        print(usage())
        raise SystemExit(0 if name else BAD_USAGE)
    if name == "--version":
        print(f"simbal {metadata.version('simbal')}")
        return
    if name in COMPLETION:
        _complete(argv)
        return
    if name not in PROGRAMS:
        close = difflib.get_close_matches(name, PROGRAMS, 1)
        hint = f"; did you mean {close[0]}?" if close else f": choose from {', '.join(PROGRAMS)}"
        print(f"error: there is no command simbal {name}{hint}", file=sys.stderr)
        raise SystemExit(BAD_USAGE)
    os.environ[STARTED_BY_NAME] = "1"
    sys.argv = [f"{NAME} {name}", *argv]
    run_program(name, argv)


def run_program(name: str, argv: list[str]) -> None:
    """Run a subcommand with its arguments, as `simbal NAME` and `python NAME.py` do."""
    module, _, function = PROGRAMS[name].function.partition(":")
    with exit_codes():
        getattr(import_module(module), function)(argv)


def usage() -> str:
    """Return the page of `simbal --help`."""
    rows = [f"  simbal {name:<8}  {program.summary}" for name, program in PROGRAMS.items()]
    about = "Experiments on how to balance the router of a Mixture-of-Experts language model."
    return "\n".join([about, "", *rows, "", "simbal COMMAND --help shows the options and examples of a command."])


def _complete(argv: list[str]) -> None:
    """Install Hydra's shell completion, or answer a completion query without the subcommand, unknown to Hydra."""
    words = re.split(r"\s+", os.environ.get("COMP_LINE", ""), maxsplit=2)
    is_query = bool(argv) and argv[0].startswith("query=")
    if is_query and len(words) < 3:
        print(" ".join(PROGRAMS))
        return
    name = words[1] if is_query else "train"  # the installation is the same for all programs
    if name in PROGRAMS and PROGRAMS[name].uses_hydra:
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
        run_program(name, ["-sc", *argv])


if __name__ == "__main__":
    main()

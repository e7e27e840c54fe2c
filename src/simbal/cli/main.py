"""The command `simbal`: starts the program that its first argument names, as `python train.py` does in a checkout."""

import difflib
import os
import re
import sys
from importlib import import_module, metadata
from typing import NamedTuple

from simbal.commands import NAME, STARTED_BY_NAME

BAD_USAGE = 2
COMPLETION = ("-sc", "--shell-completion")  # Hydra's flag


class Program(NamedTuple):
    """A subcommand: the module whose `main` takes its arguments, and what it does in one line."""

    module: str
    about: str
    composes: bool = False  # its config by Hydra, so that its keys can be completed in a shell


PROGRAMS = {  # in the order of their use
    "train": Program("simbal.cli.train", "train one model, or with -m every model of a sweep", True),
    "report": Program("simbal.cli.report", "print the table of a sweep again, from its run folders alone"),
    "runs": Program("simbal.cli.runs", "list runs, or delete them"),
    "evaluate": Program("simbal.cli.evaluate", "run analyses of trained models, or of no model at all", True),
    "export": Program("simbal.cli.export", "write trained models in the format of Hugging Face", True),
    "prepare": Program("simbal.cli.prepare", "turn text into tokens on disk", True),
    "new": Program("simbal.cli.new", "write a project of one's own: a strategy, its config, its test, a sweep"),
}


def main() -> None:
    """Start the program that `sys.argv` names, or say which there are."""
    os.environ["PYTHONSAFEPATH"] = "1"  # what lies in the current folder is no library of what is started from here
    if os.path.realpath(sys.path[0]) == os.path.realpath(os.path.dirname(sys.argv[0])):  # noqa: PTH120, as Python does
        del sys.path[0]
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
        near = difflib.get_close_matches(name, PROGRAMS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no simbal {name}{hint} (there is {', '.join(PROGRAMS)})", file=sys.stderr)
        raise SystemExit(BAD_USAGE)
    os.environ[STARTED_BY_NAME] = "1"
    sys.argv = [f"{NAME} {name}", *argv]
    import_module(PROGRAMS[name].module).main(argv)


def usage() -> str:
    """Return the list of subcommands, as `simbal --help` prints it."""
    width = max(map(len, PROGRAMS))
    rows = [f"  simbal {name:<{width}}  {program.about}" for name, program in PROGRAMS.items()]
    return "\n".join(["Experiments on how to balance the router of a Mixture-of-Experts language model.", "", *rows, "",
                      "simbal COMMAND --help says more of each, with examples."])  # fmt: skip


def _complete(argv: list[str]) -> None:
    """Install Hydra's completion in a shell, or answer it: Hydra does not know that the first word is a subcommand."""
    parts = re.split(r"\s+", os.environ.get("COMP_LINE", ""), maxsplit=2)
    query = bool(argv) and argv[0].startswith("query=")
    if query and len(parts) < 3:
        print(" ".join(PROGRAMS))
        return
    program = PROGRAMS.get(parts[1]) if query else PROGRAMS["train"]  # any one to install it
    if program and program.composes:
        os.environ["COMP_LINE"] = " ".join([parts[0], *parts[2:]])
        import_module(program.module).main(["-sc", *argv])


if __name__ == "__main__":
    main()

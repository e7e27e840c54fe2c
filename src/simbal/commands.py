"""How commands are shown: `python train.py ...` as in a checkout, or `simbal train ...` to who has typed `simbal`."""

import os
import re
import sys

STARTED_BY_NAME = "SIMBAL_COMMAND"  # a variable, so that the processes that a program starts know too
NAME = "simbal"
_PROGRAM = re.compile(r"(?<![\w./-])(?:python )?(train|prepare|evaluate|report|export)\.py(?![\w/])")


def as_typed(text: str) -> str:
    """Return a text with the names of programs as its reader types them."""
    return _PROGRAM.sub(r"simbal \1", text) if STARTED_BY_NAME in os.environ else text


def typed() -> list[str]:
    """Return the command line of this process as its user has typed it, without the Python that runs it."""
    name, _, subcommand = sys.argv[0].partition(" ")
    if name == NAME and subcommand:
        return [NAME, *sys.orig_argv[sys.orig_argv.index(subcommand) :]]
    return sys.orig_argv[1:]

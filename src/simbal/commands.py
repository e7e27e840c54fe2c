"""Commands as the user types them: `python train.py ...` in a checkout, `simbal train ...` elsewhere."""

import os
import re
import sys

STARTED_BY_NAME = "SIMBAL_COMMAND"  # an environment variable, so that child processes inherit it
NAME = "simbal"
PYTHON_CALL: list[str] = []  # the command that a call from Python replaces, such as simbal train -m seed=0-4
_PROGRAM = re.compile(r"(?<![\w./-])(?:python )?(train|prepare|evaluate|report|export)\.py(?![\w/])")


def format_command(text: str) -> str:
    """Replace `python train.py` with `simbal train` if the user started the program that way."""
    return _PROGRAM.sub(r"simbal \1", text) if STARTED_BY_NAME in os.environ else text


def original_command() -> list[str]:
    """Return the words of this process's command line as the user typed them, without the Python executable."""
    if PYTHON_CALL:
        return [*PYTHON_CALL]
    name, _, subcommand = sys.argv[0].partition(" ")
    if name == NAME and subcommand:
        return [NAME, *sys.orig_argv[sys.orig_argv.index(subcommand) :]]
    return sys.orig_argv[1:]

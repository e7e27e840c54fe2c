"""The command reference: the help pages of `simbal` and the targets of `make`."""

import os
import re
import subprocess
import sys
from pathlib import Path

from generators.markup import WIDE, code, prose, table
from simbal.cli.main import PROGRAMS

_TARGET = re.compile(r"^([a-z-]+):.*?## (.+)$", re.MULTILINE)


def commands_page(root: Path) -> str:
    """Return the page with the help of every subcommand and the targets of the Makefile."""
    parts = [WIDE, "# Commands\n", "The help page of each subcommand, and the targets of `make`.\n"]
    for name in PROGRAMS:
        same = f"In a checkout also `python {name}.py`.\n\n" * (root / f"{name}.py").exists()
        parts.append(f"## simbal {name}\n\n{same}{code(_help(name))}")
    rows = [(f"`make {name}`", prose(what)) for name, what in _TARGET.findall((root / "Makefile").read_text())]
    parts.append(f"## make\n\n{table(('command', 'effect'), rows)}")
    return "\n".join(parts)


def _help(name: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("simbal"), name, "--help"],
        env=os.environ | {"COLUMNS": "110", "NO_COLOR": "1"},  # argparse uses the width of the terminal
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"simbal {name} --help: {done.stderr}")
    return done.stdout

"""The command reference: what each program and `make` say of themselves."""

import os
import re
import subprocess
import sys
from pathlib import Path

from generators.markup import WIDE, code, prose, table

FIRST = ("train.py", "evaluate.py", "report.py", "prepare.py")  # in the order of their use; others follow
_TARGET = re.compile(r"^([a-z-]+):.*?## (.+)$", re.MULTILINE)


def commands_page(root: Path) -> str:
    """Return the page: `--help` of every program, and the targets of the Makefile."""
    found = [path.name for path in sorted(root.glob("*.py"))]
    parts = [WIDE, "# Commands\n", "What `--help` prints, and `make` without a target.\n"]
    for program in sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        parts.append(f"## {program}\n\n{code(_help(root, program))}")
    rows = [(f"`make {name}`", prose(what)) for name, what in _TARGET.findall((root / "Makefile").read_text())]
    parts.append(f"## make\n\n{table(('command', 'what it does'), rows)}")
    return "\n".join(parts)


def _help(root: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=root,
        env=os.environ | {"COLUMNS": "110", "NO_COLOR": "1"},  # argparse asks for the width of the terminal
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"python {program} --help: {done.stderr}")
    return done.stdout

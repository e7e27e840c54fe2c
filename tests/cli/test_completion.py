"""A shell completes subcommands, options and keys, by the lines that docs/guide/installing.md tells to type."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CONF

GUIDE = (CONF.parent / "docs/guide/installing.md").read_text()
LINES = re.findall(r"^    (eval .*)$", GUIDE, re.MULTILINE)
ASK = """
for line in "$@"; do
    COMP_LINE="$line"; COMP_POINT=${#line}; words=($line); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    [[ "$line" == *" " ]] && COMP_CWORD=${#words[@]}
    hydra_bash_completion
    echo "${COMPREPLY[*]}"
done
"""


def completions(install: str, *lines: str) -> list[str]:
    """What bash would offer after each line, once `install` was typed."""
    bash, folder = shutil.which("bash"), Path(sys.executable).parent
    assert bash
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = [bash, "-c", install + ASK, "bash", *lines]
    done = subprocess.run(command, cwd=CONF.parent, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow  # starts Python anew for each line
@pytest.mark.parametrize("install", LINES)
def test_a_shell_completes_what_there_is(install):
    assert len(LINES) == 2
    train = "simbal train" if "simbal" in install else "python train.py"
    sweeps = sorted(path.stem for path in (CONF.parent / "sweeps").glob("sig*.yaml"))
    assert completions(install, f"{train} balancing=si", f"{train} -m sweeps=sig", f"{train} trainer.max") == [
        "balancing=simbal balancing=sinkhorn", " ".join(f"sweeps={name}" for name in sweeps), "trainer.max_steps=",
    ]  # fmt: skip

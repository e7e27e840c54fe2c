"""The kernels of `fused`, `megablocks`, head and rotations in Triton's interpreter, chosen when kernels are defined.

Their tests run in processes of their own: one in the default run, which tries every kernel in every dtype, and one for
all other cases of each backend. The first is not marked slow, process or not: nothing else there runs the kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experts.test_megablocks import MISSING

TESTS = Path(__file__).parents[1]
FILES = {
    "model/head_interpreted.py": MISSING & {"triton"},
    "model/rotary_interpreted.py": MISSING & {"triton"},
    "experts/fused_interpreted.py": MISSING & {"triton"},
    "experts/megablocks_interpreted.py": MISSING,
}
POSSIBLE = [name for name, missing in FILES.items() if not missing]


def interpret(folder: Path, *names: str, markers: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "SLIPCOVER_"))}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(TESTS / name) for name in names]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", markers)
    # in a folder of ours it does not delete what earlier runs of all tests have left
    command = (sys.executable, "-m", "pytest", f"--basetemp={folder / 'tests'}", *options, *files)
    done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not POSSIBLE, reason="Triton is not installed: make setup-gpu")
def test_every_kernel_equals_reference_in_every_dtype(tmp_path):
    interpret(tmp_path, *POSSIBLE, markers="not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("experts")])
def test_kernels_equal_reference_in_all_other_cases(name, tmp_path):
    if FILES[name]:
        pytest.skip(f"not installed: {', '.join(FILES[name])}: make setup-gpu")
    interpret(tmp_path, name, markers="slow")

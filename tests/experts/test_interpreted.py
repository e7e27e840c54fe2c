"""The Triton kernels, run by Triton's interpreter, which must be selected before kernels are defined.

Therefore these tests run in separate processes: one in the default run tests every kernel in every dtype, and one per
expert backend runs the slow cases.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experts.test_select import MISSING

TESTS = Path(__file__).parents[1]
FILES = {
    "model/kernels_interpreted.py": MISSING & {"triton"},
    "experts/fused_interpreted.py": MISSING & {"triton"},
    "experts/megablocks_interpreted.py": MISSING,
}
POSSIBLE = [name for name, missing in FILES.items() if not missing]


def interpret(folder: Path, *names: str, markers: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "SLIPCOVER_"))}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(TESTS / name) for name in names]
    # with its own --basetemp it does not delete the temporary folders of earlier runs
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", markers, f"--basetemp={folder / 'tests'}")
    command = (sys.executable, "-m", "pytest", *options, *files)
    done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not POSSIBLE, reason="Triton is not installed: make setup-gpu")
def test_every_kernel_equals_its_reference_in_every_dtype(tmp_path):
    interpret(tmp_path, *POSSIBLE, markers="not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("experts")])
def test_kernels_equal_reference_in_all_other_cases(name, tmp_path):
    if FILES[name]:
        pytest.skip(f"not installed: {', '.join(FILES[name])}: make setup-gpu")
    interpret(tmp_path, name, markers="slow")

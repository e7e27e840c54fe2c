"""The kernels of `fused` and `megablocks` in Triton's interpreter, which is chosen when a kernel is defined.

Their tests run in processes of their own: one for the default run, which tries every kernel in every dtype, and one for
all other cases of each backend.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experts.test_megablocks import needs_megablocks

HERE = Path(__file__).parent
FUSED, MEGABLOCKS = HERE / "fused_interpreted.py", HERE / "megablocks_interpreted.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton==3.7.1"
)


def interpret(file: Path, markers: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", markers, file)
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FILES = [pytest.param(FUSED, marks=needs_triton), pytest.param(MEGABLOCKS, marks=needs_megablocks)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_kernel_equals_reference_in_every_dtype(file):
    interpret(file, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_equal_reference_in_all_other_cases(file):
    interpret(file, "slow")

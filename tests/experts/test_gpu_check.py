"""`make gpu-check` runs from end to end on a CPU with SMOKE=1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experts.test_select import needs_megablocks


@pytest.mark.slow
@needs_megablocks
def test_the_dry_run_checks_every_backend_and_prints_a_section():
    command = (sys.executable, "-m", "benchmarks.gpu_check")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SMOKE": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## Expert layers on CPU, Triton interpreter, ")
    for name in ("torch", "megablocks", "fused", "MegaBlocks' module, sparse", "MegaBlocks' module, grouped"):
        assert done.stdout.count(f"| {name} |") == 5  # three routings checked, two timed
    assert done.stdout.count("| MoE-M | ") == 3

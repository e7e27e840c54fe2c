"""`make gpu-check` runs through: on a CPU, as SMOKE=1, since that is all that CI has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experts.test_megablocks import needs_megablocks

REPOSITORY = Path(__file__).parents[2]


def dry_run(name, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SMOKE": "1"}
    command = (sys.executable, "-m", f"benchmarks.{name}", *arguments)
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@needs_megablocks
def test_the_dry_run_checks_every_backend_and_prints_a_section():
    done = dry_run("gpu_check")
    assert done.stdout.startswith("## Expert layers on CPU, Triton interpreter, ")
    assert "the numbers mean nothing" in done.stdout
    for name in ("torch", "megablocks", "fused", "MegaBlocks' module, sparse", "MegaBlocks' module, grouped"):
        assert done.stdout.count(f"| {name} |") == 5  # three routings checked, two timed
    assert done.stdout.count("| MoE-M | ") == 3
    assert "\n- D 128, F 128: " in done.stdout
    widths = {line.count("|") for line in done.stdout.splitlines() if line.startswith("| small")}
    assert widths == {13}

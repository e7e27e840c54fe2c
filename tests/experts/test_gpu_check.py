"""`make gpu-check` runs through: on a CPU, as SMOKE=1, since that is all that CI has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.experts.test_megablocks import needs_megablocks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def run(*arguments, **variables):
    environment = {key: value for key, value in os.environ.items() if key not in ("SMOKE", "TRITON_INTERPRET")}
    command = (sys.executable, str(SCRIPT), *arguments)
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@needs_megablocks
def test_the_dry_run_checks_every_backend_and_prints_a_section():
    done = run(SMOKE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## Expert layers on CPU, Triton interpreter, ")
    assert "the numbers mean nothing" in done.stdout
    for name in ("torch", "megablocks", "fused", "MegaBlocks' module, sparse", "MegaBlocks' module, grouped"):
        assert done.stdout.count(f"| {name} |") == 5  # three routings checked, two timed
    assert done.stdout.count("| MoE-M | ") == 3
    assert "\n- D 128, F 128: " in done.stdout
    widths = {line.count("|") for line in done.stdout.splitlines() if line.startswith("| small")}
    assert widths == {13}


@needs_megablocks
def test_a_dry_run_is_never_written_down():
    done = run("--write", SMOKE="1")
    assert (done.returncode, done.stderr.strip()) == (
        1, "error: --write with SMOKE=1 would record numbers that mean nothing",
    )  # fmt: skip


@needs_megablocks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    assert "error: no CUDA device is visible" in run().stderr

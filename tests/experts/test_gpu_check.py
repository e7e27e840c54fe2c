"""`make gpu-check` runs through: on a CPU, as SMOKE=1, since that is all that CI has."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from simbal.errors import UserError
from tests.experts.test_megablocks import needs_megablocks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
@needs_megablocks
def test_the_dry_run_checks_every_backend_and_prints_a_section():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SMOKE": "1"}
    done = subprocess.run((sys.executable, str(SCRIPT)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## Expert layers on CPU, Triton interpreter, ")
    assert "the numbers mean nothing" in done.stdout
    for name in ("torch", "megablocks", "fused", "MegaBlocks' module, sparse", "MegaBlocks' module, grouped"):
        assert done.stdout.count(f"| {name} |") == 5  # three routings checked, two timed
    assert done.stdout.count("| MoE-M | ") == 3
    assert "\n- D 128, F 128: " in done.stdout
    widths = {line.count("|") for line in done.stdout.splitlines() if line.startswith("| small")}
    assert widths == {13}


@pytest.fixture
def main(monkeypatch):
    """`main("--write", smoke=True)`: the program in this process, as far as it comes before it measures."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # whose first entry it replaces
    monkeypatch.delenv("SMOKE", raising=False)
    gpu_check = importlib.import_module("benchmarks.gpu_check")

    def run_main(*arguments, smoke=False):
        monkeypatch.setattr(gpu_check, "SMOKE", smoke)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        gpu_check.main()

    return run_main


def test_a_dry_run_is_never_written_down(main):
    with pytest.raises(UserError, match="^--write with SMOKE=1 would record numbers that mean nothing$"):
        main("--write", smoke=True)


def test_without_a_gpu_it_says_so(main, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="^no CUDA device is visible: run this on a GPU, or SMOKE=1"):
        main()

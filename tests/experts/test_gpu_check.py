"""`make gpu-check` runs through: on a CPU, as SMOKE=1, since that is all that CI has."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.timing import Timing
from simbal.errors import UserError
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


@pytest.mark.slow
@needs_megablocks
def test_block_shapes_are_checked_and_timed():
    lines = dry_run("fused_blocks", "--kernels", "up", "--processes", "1").stdout.splitlines()
    assert lines[0].split(" | ")[-2:] == ["balanced ms", "skewed ms |"]
    assert lines[2].startswith("| 256 | up | 64, 64, 8, 3 (in use) | ")
    error, balanced, skewed = (float(cell) for cell in lines[2].split("|")[4:7])
    assert error < 1e-5
    assert min(balanced, skewed) > 0


@pytest.fixture
def main(monkeypatch):
    """`main("--write", smoke=True)`: the program in this process, as far as it comes before it measures."""
    monkeypatch.delenv("SMOKE", raising=False)
    gpu_check = importlib.import_module("benchmarks.gpu_check")

    def run_main(*arguments, smoke=False):
        monkeypatch.setattr(gpu_check, "SMOKE", smoke)
        monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
        gpu_check.main()

    return run_main


def test_a_dry_run_is_never_written_down(main):
    with pytest.raises(UserError, match="^--write with SMOKE=1 would record numbers that mean nothing$"):
        main("--write", smoke=True)


def test_without_a_gpu_it_says_so(main, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="^no CUDA device is visible: run this on a GPU, or SMOKE=1"):
        main()


@needs_megablocks
def test_ctrl_c_prints_what_was_measured_until_then(main, monkeypatch, capsys):
    gpu_check = importlib.import_module("benchmarks.gpu_check")

    def layers(*_):
        yield gpu_check.SMALL, "balanced", "fused", Timing(1.0, 2.0, 3.0, 0.1, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "check", lambda *_: iter([("fused", "balanced", 1e-7)]))
    monkeypatch.setattr(gpu_check, "matmul_peak", lambda *_: 1.0)
    monkeypatch.setattr(gpu_check, "time_layers", layers)
    main(smoke=True)
    printed = capsys.readouterr()
    assert "| small | 24 | balanced | fused | 1.000 | 2.000 | 3.000 | 10.0% |" in printed.out
    assert printed.err.endswith("interrupted: what was measured until now\n")

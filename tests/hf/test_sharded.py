"""With FSDP2, strategies train two ranks as one process that has both micro-batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hf import sharded
from tests.hf.architectures import host

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def train_two_ranks(folder: Path, how: str) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, sharded.__file__, str(folder), how], check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return load_file(folder / "weights.safetensors")


def test_a_loop_with_sharded_weights_trains_as_one_process_does(tmp_path):
    expected = sharded.train_in_a_loop(host("ernie4_5_moe"), [0, 1])
    torch.testing.assert_close(train_two_ranks(tmp_path, "loop"), expected, rtol=1e-3, atol=1e-5)


def test_the_trainer_shards_and_trains_as_one_process_does(tmp_path):
    expected = sharded.train_in_the_trainer(tmp_path)
    torch.testing.assert_close(train_two_ranks(tmp_path, "trainer"), expected, rtol=1e-3, atol=1e-5)

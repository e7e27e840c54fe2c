"""A run that is short of memory, disk or open files says so in one sentence, and the runs beside it go on."""

import os
import subprocess

import pytest

from simbal.data.store import prepare
from simbal.runs.folder import RunFolder
from tests.conftest import MARKOV, SMALL
from tests.programs import run

pytestmark = pytest.mark.slow

# what a process does before it is train.py
SHORT_OF_MEMORY = """
import resource
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, ((used + 200 * 1024) * 1024,) * 2)
"""
SHORT_OF_FILES = """
import contextlib, os, resource
from simbal.training.lit_moe import LitMoE
def step(self, *_):
    with contextlib.ExitStack() as leak:
        while True:
            leak.enter_context(open(os.devnull))
LitMoE.training_step = step
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
"""
SHORT_FILES_ONLY = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (48_000, 48_000))
"""
UNLIMITED = ""
# one tensor of hidden values is 32 MiB at micro_batch=64, and the weights are 3 MB
WIDE = ("balancing=none", "model.num_experts=0", "model.top_k=1", "model.d_expert=8192", "trainer.global_batch=64")
FEW_STEPS = ("trainer.max_steps=2", "trainer.val_every=2", "trainer.ckpt_every=2")


@pytest.fixture
def program(tmp_path, cache_dir, small_spec):
    """`program(SHORT_OF_FILES, "seed=1")`: the ended process; the data have been prepared before."""
    prepare(small_spec().config.data, progress=False)

    def started(code, *keys, output_dir=tmp_path / "outputs"):
        places = (f"output_dir={output_dir}", f"data.cache_dir={cache_dir}")
        (tmp_path / "sitecustomize.py").write_text(code)
        return run("train.py", *SMALL, *MARKOV, *places, *keys, cwd=tmp_path, PYTHONPATH=str(tmp_path))

    return started


def records(folder):
    return {path.parent.name: RunFolder(path.parent).read_record() for path in folder.rglob("record.json")}


def assert_failed(ended, record, cause, says):
    assert ended.returncode != 0, ended.stdout
    assert (record["status"], record["cause"]) == ("failed", cause)
    assert says in record["error"]
    assert "\n" not in record["error"]
    assert f"error: {record['error']}" in ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("code", "keys", "cause", "says"),
    [
        (SHORT_OF_MEMORY, (*WIDE, "trainer.micro_batch=64"), "memory", "set trainer.micro_batch=32"),
        (SHORT_OF_FILES, (), "open files", "allow more with `ulimit -n`"),
        (SHORT_FILES_ONLY, (), "disk", "File too large; allow longer files with `ulimit -f`"),
    ],
    ids=["memory", "open files", "long files"],
)
def test_a_run_that_is_short_of_something_ends_in_one_sentence_and_a_record(program, tmp_path, code, keys, cause, says):
    ended = program(code, *FEW_STEPS, *keys)
    (record,) = records(tmp_path / "outputs").values()
    assert_failed(ended, record, cause, says)


def test_a_disk_that_is_really_full_ends_a_run_in_one_sentence_and_a_record(program, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        keys = ("trainer.max_steps=400", "trainer.val_every=400", "trainer.keep_every=1")
        ended = program(UNLIMITED, *keys, output_dir=disk / "outputs")
        (record,) = records(disk).values()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert_failed(ended, record, "disk", "No space left on device; free some space, or choose another output_dir=")


def test_a_run_that_is_short_of_memory_leaves_the_others_of_its_sweep_alone(program, tmp_path):
    keys = ("trainer.micro_batch=64,8", "hydra.launcher.n_jobs=1")
    ended = program(SHORT_OF_MEMORY, "-m", *WIDE, *FEW_STEPS, *keys)
    assert ended.returncode == 1, ended.stderr
    found = records(tmp_path / "outputs").values()
    assert sorted(record["status"] for record in found) == ["failed", "finished"]
    (failed,) = (record for record in found if record["status"] == "failed")
    assert failed["cause"] == "memory"
    assert "set trainer.micro_batch=32" in failed["error"]
    assert "ran out of memory" in ended.stdout  # under the table

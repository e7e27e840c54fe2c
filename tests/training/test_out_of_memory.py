"""A run that is short of memory or disk says so in one sentence, and the runs beside it go on."""

import pytest
import torch

from simbal.data.prepare import prepare
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.failures import memory_errors
from tests.conftest import MARKOV, SMALL
from tests.programs import run

CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
ADVICE = "use a smaller trainer.micro_batch"

# what a process does before it is train.py
SHORT_OF_MEMORY = """
import resource
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, ((used + 200 * 1024) * 1024,) * 2)
"""
# one tensor of hidden values is 32 MiB at micro_batch=64, and the weights are 3 MB
WIDE = ("balancing=none", "model.num_experts=0", "model.top_k=1", "model.d_expert=8192", "trainer.global_batch=64")
FEW_STEPS = ("trainer.max_steps=2", "trainer.val_every=2", "trainer.ckpt_every=2")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(CPU_MESSAGE),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_an_out_of_memory_error_suggests_a_smaller_micro_batch(error):
    with pytest.raises(UserError, match=ADVICE), memory_errors():
        raise error


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="the loss is nan"), memory_errors():
        raise RuntimeError("the loss is nan")


@pytest.fixture
def program(tmp_path, cache_dir, small_spec):
    """`program(SHORT_OF_MEMORY, "seed=1")`: the ended process; the data have been prepared before."""
    prepare(small_spec().config.data, progress=False)

    def started(code, *keys, output_dir=tmp_path / "outputs"):
        places = (f"output_dir={output_dir}", f"data.cache_dir={cache_dir}")
        (tmp_path / "sitecustomize.py").write_text(code)
        return run("train.py", *SMALL, *MARKOV, *places, *keys, cwd=tmp_path, PYTHONPATH=str(tmp_path))

    return started


def records(folder):
    return {path.parent.name: RunFolder(path.parent).read_record() for path in folder.rglob("record.json")}


@pytest.mark.slow
def test_a_run_that_is_short_of_memory_leaves_the_others_of_its_sweep_alone(program, tmp_path):
    keys = ("trainer.micro_batch=64,8", "hydra.launcher.n_jobs=1")
    ended = program(SHORT_OF_MEMORY, "-m", *WIDE, *FEW_STEPS, *keys)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    found = records(tmp_path / "outputs").values()
    assert sorted(record["status"] for record in found) == ["failed", "finished"]
    (failed,) = (record for record in found if record["status"] == "failed")
    assert ADVICE in failed["error"]
    assert ADVICE in ended.stdout  # under the table

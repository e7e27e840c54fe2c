"""Processes that train one model together do what one does, write once, go on to the bit and leave nobody behind."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.failures import RANK_ERROR
from simbal.training.module import LitMoE
from simbal.training.run import train
from tests.child_processes import wait_until
from tests.conftest import CONF, MARKOV, SMALL
from tests.programs import run
from tests.training.run_files import OTHER_HEADS, assert_same_run, weights, without_speed
from tests.training.test_stop import signal_in

PAIR = ("trainer.devices=2", "trainer.micro_batch=2")  # two micro-batches a step on each
FORKED = pytest.mark.usefixtures("forked_ranks")
STRATEGIES = ("ddp", "fsdp")
WITH_BIAS = ("balancing=lf_lbl", "optim.grad_clip=0.1")
# 33 windows to validate on: one rank has a batch more than the other
MEASURED = ("data.validation_tokens=528", "trainer.pes_every=5")


def command(folder, cache_dir, *keys: str) -> list[str]:
    places = (f"output_dir={folder}", f"data.cache_dir={cache_dir}")
    return [*SMALL, *MARKOV, *places, *PAIR, *keys]


def files(spec) -> list[str]:
    """Every file, and a checkpoint in shards as one."""
    found = (file.parent if file.parent.suffix == ".ckpt" else file for file in spec.path.rglob("*") if file.is_file())
    return sorted({str(file.relative_to(spec.path)) for file in found})


def leaves(value, path: str = ""):
    """Every number of a row, with where it stands."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, child in children:
        yield from leaves(child, f"{path}/{key}")
    if not isinstance(value, dict | list):
        yield path, value


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("ddp", ("balancing=[simbal,lbl]", "balancing.lbl.scope=global", *MEASURED)),
        ("ddp", (*WITH_BIAS, *MEASURED)),
        ("ddp", ("balancing=ortho_param", "trainer.skip_nonfinite=1", *MEASURED)),
        (
            "fsdp",
            (
                "balancing=[simbal,ernie_ortho]",
                "balancing.ernie_ortho.decoupled=true",
                "trainer.activation_checkpointing=true",
                *MEASURED,
            ),
        ),
        ("fsdp", (*WITH_BIAS, *MEASURED)),
        ("fsdp", ("balancing=ortho_param", *MEASURED)),
        ("fsdp", ("balancing=lf_frozen", *MEASURED)),
        ("fsdp", ("balancing=prototype", "model.num_shared_experts=1", *MEASURED)),
        ("ddp", ("balancing=[erc,expert_overlap,cosine]", "model.num_shared_experts=1", *MEASURED)),
        ("fsdp", ("balancing=lf_lbl", *OTHER_HEADS, *MEASURED, "trainer.activation_checkpointing=true")),
        ("fsdp", ("balancing=none", "model.num_experts=0", "model.qk_norm=projection", *OTHER_HEADS[:2], MEASURED[0])),
    ],
)
def test_two_ranks_follow_the_curves_of_one_to_rounding(finished, strategy, keys):
    one, two = finished("trainer.micro_batch=2", *keys), finished(*PAIR, f"trainer.strategy={strategy}", *keys)
    assert active_children() == []
    for ours, theirs in zip(without_speed(two), without_speed(one), strict=True):
        assert dict(leaves(ours)) == pytest.approx(dict(leaves(theirs)), rel=2e-5, abs=1e-6)
    metrics = [RunFolder(spec.path).read_record()["metrics"] for spec in (one, two)]
    numbers = [{key: value for key, value in found.items() if value is not None} for found in metrics]
    assert metrics[0].keys() == metrics[1].keys()
    assert numbers[1] == pytest.approx(numbers[0], rel=2e-5, abs=1e-6)
    assert files(one) == files(two)
    trained = weights(two)
    assert all(torch.allclose(tensor, trained[name], atol=2e-5) for name, tensor in weights(one).items())


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "more"), [("ddp", ()), ("fsdp", ()), ("fsdp", OTHER_HEADS)])
def test_it_stops_and_goes_on_to_the_bit(small_spec, finished, monkeypatch, strategy, more):
    keys = (*PAIR, f"trainer.strategy={strategy}", *WITH_BIAS, *MEASURED, *more)
    whole, stopped = finished(*keys), small_spec(*keys)
    with monkeypatch.context() as patch:
        signal_in(patch, "training_step", 6, signal.SIGTERM)  # of this process alone, the first rank
        with pytest.raises(SystemExit) as end:
            train(stopped)
    assert end.value.code == 143
    assert (stopped.path / "checkpoints" / "step-00000007.ckpt").exists()
    train(stopped)
    assert_same_run(whole, stopped)
    assert active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "victim"), [("ddp", "other rank"), ("ddp", "all"), ("fsdp", "all")])
def test_a_run_whose_processes_are_killed_resumes_to_the_bit(tmp_path, cache_dir, strategy, victim):
    """kill -9 of what a user's command has started; a lost rank is also recorded as a failure."""
    keys = command(tmp_path, cache_dir, f"trainer.strategy={strategy}", *WITH_BIAS, "trainer.max_steps=60")
    program = [sys.executable, str(CONF.parent / "train.py"), *keys]
    killed = subprocess.Popen([*program, "name=killed"], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: killed.poll() is not None or any(tmp_path.glob("killed/*/checkpoints/step-*.ckpt")))
    processes = descendants(killed.pid)
    assert len(processes) == 3
    for process in processes if victim == "all" else processes[-1:]:
        os.kill(process, signal.SIGKILL)
    _, errors = killed.communicate()
    assert killed.returncode == (-signal.SIGKILL if victim == "all" else 1)
    if victim != "all":
        (record,) = tmp_path.glob("killed/*/record.json")
        assert json.loads(record.read_text())["status"] == "failed"
        assert errors.splitlines()[-1].startswith("error: a rank was killed")
    for name in ("killed", "whole"):
        subprocess.run([*program, f"name={name}"], check=True)
    (resumed,), (whole,) = (
        [RunFolder(path).read_spec() for path in tmp_path.glob(f"{name}/*")] for name in ("killed", "whole")
    )
    assert_same_run(whole, resumed)


def descendants(process: int) -> list[int]:
    """A process and all that it has started, oldest first."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(found for child in children for found in descendants(int(child)))]


@FORKED
@pytest.mark.slow
def test_a_failure_of_rank_zero_ends_the_others(small_spec, monkeypatch):
    spec = small_spec(*PAIR)
    with monkeypatch.context() as patch:
        patch.setattr(LitMoE, "finish_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(spec)
    assert RunFolder(spec.path).read_record()["error"] == "ZeroDivisionError: division by zero"
    assert active_children() == []


@FORKED
@pytest.mark.slow
def test_the_error_of_another_rank_is_the_runs_error(small_spec, monkeypatch):
    """As the other rank would write it, and then end."""
    spec = small_spec(*PAIR)

    def lost(*_):
        (spec.path / RANK_ERROR).write_text("rank 1: out of memory")
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(LitMoE, "finish_step", lost)
        with pytest.raises(UserError, match="rank 1: out of memory"):
            train(spec)
    assert RunFolder(spec.path).read_record()["error"] == "rank 1: out of memory"


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_divergence_on_ranks_is_recorded_once(small_spec, strategy):
    spec = small_spec(*PAIR, f"trainer.strategy={strategy}", "optim.lr=1e30", "optim.grad_clip=0")
    with pytest.raises(UserError, match="diverged: the loss is not finite"):
        train(spec)
    record = RunFolder(spec.path).read_record()
    assert record["status"] == "diverged"
    assert record["layers"]


@pytest.mark.slow
def test_a_multirun_trains_each_run_on_ranks(tmp_path, cache_dir):
    keys = command(tmp_path, cache_dir, "balancing=simbal,lbl", "trainer.max_steps=6")
    done = run("train.py", "-m", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("default/*/record.json")]) == 2
    assert (tmp_path / "default" / "table.json").exists()
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path, cache_dir):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [*launcher, str(CONF.parent / "train.py"), *command(tmp_path, cache_dir, "trainer.max_steps=6")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("val/ppl") == 1
    assert len([*tmp_path.glob("default/*/record.json")]) == 1


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}),
        (
            "srun",
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"},
        ),
    ],
)
def test_another_number_of_processes_is_refused_in_one_sentence(small_spec, monkeypatch, launcher, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = small_spec(*PAIR)
    with pytest.raises(UserError, match=f"^{launcher} started 8 processes, but trainer.devices=2"):
        train(spec)
    assert not spec.path.exists()


@FORKED
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("trainer.micro_batch=8",), "micro_batch=8 .*trainer.devices=2: trainer.micro_batch may be 1, 2, 4"),
        (("trainer.devices=0",), "trainer.devices=0 must be at least 1"),
        (("trainer.strategy=fsdp9",), "trainer.strategy=fsdp9 is not one of auto, ddp, fsdp"),
        pytest.param(
            ("data.validation_tokens=16",),
            "1 windows of the validation data are less than trainer.devices=2",
            marks=pytest.mark.slow,  # each rank finds it
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_in_one_sentence(small_spec, keys, says):
    with pytest.raises(UserError, match=says):
        train(small_spec(*PAIR, *keys))
    assert active_children() == []

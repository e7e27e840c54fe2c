"""Ranks that train one model together: same curves as one device, files written once, exact resume, no orphans.

Most tests fork the ranks from a server that has imported torch; some start them from the command line.
"""

import json
import os
import re
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.analysis.trained import load
from simbal.cli.resume import run_to_resume
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training import checkpoint, strategies
from simbal.training.callbacks import MetricsLogger
from simbal.training.checkpoint import DamagedCheckpointError
from simbal.training.failures import RANK_ERROR
from simbal.training.module import LitMoE
from simbal.training.run import train
from tests.child_processes import wait_until
from tests.conftest import CONF, MARKOV, SMALL
from tests.programs import Program, run
from tests.training.run_files import (
    OTHER_HEADS,
    KilledError,
    assert_same_run,
    checkpoints,
    train_killed,
    train_until,
    weights,
    without_speed,
)
from tests.training.test_stop import send_signal_in

FORKED = pytest.mark.usefixtures("forked_ranks")
PAIR = ("trainer.devices=2", "trainer.micro_batch=2")  # two micro-batches a step on each rank
FSDP = (*PAIR, "trainer.strategy=fsdp", "balancing=lf_lbl")
WITH_BIAS = ("balancing=lf_lbl", "optim.grad_clip=0.1")
# 33 validation windows, so that one rank has one batch more than the other
MEASURED = ("data.validation_tokens=528", "trainer.pes_every=5")


def command(folder, cache_dir, *keys: str) -> list[str]:
    places = (f"output_dir={folder}", f"data.cache_dir={cache_dir}")
    return [*SMALL, *MARKOV, *places, *PAIR, *keys]


def assert_close_runs(first, second) -> None:
    torch.testing.assert_close(without_speed(first), without_speed(second), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(weights(first), weights(second), rtol=1e-5, atol=2e-5)


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("ddp", ("balancing=[simbal,lbl]", "balancing.lbl.scope=global", *MEASURED)),
        ("ddp", (*WITH_BIAS, *MEASURED)),
        ("ddp", ("balancing=[erc,expert_overlap,cosine]", "model.num_shared_experts=1")),
        ("fsdp", ("balancing=[simbal,ernie_ortho]", "balancing.ernie_ortho.decoupled=true", *MEASURED)),
        ("fsdp", (*WITH_BIAS, *OTHER_HEADS, "trainer.activation_checkpointing=true", *MEASURED)),
        ("fsdp", ("balancing=ortho_param", "trainer.skip_nonfinite=1")),
        ("fsdp", ("balancing=prototype", "model.num_shared_experts=1", *MEASURED)),
        ("fsdp", ("balancing=none", "model.num_experts=0", "model.qk_norm=projection", *OTHER_HEADS[:2], MEASURED[0])),
    ],
)
def test_two_ranks_follow_the_curves_of_one_device_up_to_rounding(finished, strategy, keys):
    keys = (*keys, "trainer.max_steps=6")
    one, two = finished("trainer.micro_batch=2", *keys), finished(*PAIR, f"trainer.strategy={strategy}", *keys)
    assert active_children() == []
    assert_close_runs(two, one)
    metrics = [RunFolder(spec.path).read_record()["metrics"] for spec in (one, two)]
    numbers = [{key: value for key, value in found.items() if value is not None} for found in metrics]
    assert numbers[1] == pytest.approx(numbers[0], rel=2e-5, abs=1e-6)
    files = [sorted(str(file.relative_to(spec.path)) for file in spec.path.rglob("*")) for spec in (one, two)]
    assert files[0] == files[1]


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize("keys", [("trainer.strategy=ddp",), ("trainer.strategy=fsdp", *OTHER_HEADS)])
def test_ranks_stop_at_a_signal_and_resume_to_the_same_bits(small_spec, finished, monkeypatch, keys):
    keys = (*PAIR, *keys, *WITH_BIAS, *MEASURED)
    reference, stopped = finished(*keys), small_spec(*keys)
    with monkeypatch.context() as patch:
        send_signal_in(patch, "training_step", 6, signal.SIGTERM)  # only rank zero receives it
        with pytest.raises(SystemExit) as end:
            train(stopped)
    assert end.value.code == 143
    assert (stopped.path / "checkpoints" / "step-00000007.ckpt").exists()
    train(stopped)
    assert_same_run(reference, stopped)
    assert active_children() == []


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_resumes_to_the_same_bits_after_kill_9_of_one_rank_and_of_all(
    small_spec, finished, cache_dir, monkeypatch, strategy
):
    """DDP loses one rank of a user's command, then all ranks; FSDP the other way round."""
    keys = (f"trainer.strategy={strategy}", *WITH_BIAS, "trainer.max_steps=40", "trainer.val_every=40")
    reference, killed = finished(*PAIR, *keys), small_spec(*PAIR, *keys)
    user = Program("train.py", *command(killed.config.output_dir, cache_dir, *keys), cwd=killed.path.parents[2])
    wait_until(lambda: user.poll() is not None or any(killed.path.glob("checkpoints/step-*.ckpt")))
    processes = descendants(user.pid)
    assert len(processes) == 3
    for process in processes[-1:] if strategy == "ddp" else processes:
        os.kill(process, signal.SIGKILL)
    _, errors = user.communicate()
    if strategy == "ddp":
        assert user.returncode == 1
        assert json.loads((killed.path / "record.json").read_text())["status"] == "failed"
        assert re.match("error: a (rank|process of the run) was killed", errors.splitlines()[-1])
        train_until(monkeypatch, killed, 36)
    else:
        assert user.returncode == -signal.SIGKILL
        with monkeypatch.context() as patch:
            patch.setattr(MetricsLogger, "on_train_batch_end", kill_other_ranks_in_step(36))
            with pytest.raises(UserError, match="a rank was killed"):
                train(killed)
    train(killed)
    assert_same_run(reference, killed)


def descendants(process: int) -> list[int]:
    """Return a process and everything it has started, oldest first."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(found for child in children for found in descendants(int(child)))]


def kill_other_ranks_in_step(step: int):
    original = MetricsLogger.on_train_batch_end

    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == step:
            for process in active_children():
                os.kill(process.pid, signal.SIGKILL)
        original(self, trainer, *rest)

    return on_train_batch_end


@FORKED
@pytest.mark.slow
def test_the_error_of_another_rank_is_the_runs_error(small_spec, monkeypatch):
    spec = small_spec(*PAIR)

    def lose_rank(*_):
        (spec.path / RANK_ERROR).write_text("rank 1: out of memory")  # as rank 1 writes it before it ends
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection reset by peer")

    monkeypatch.setattr(LitMoE, "finish_step", lose_rank)
    with pytest.raises(UserError, match="rank 1: out of memory"):
        train(spec)
    assert RunFolder(spec.path).read_record()["error"] == "rank 1: out of memory"


@FORKED
@pytest.mark.slow
def test_divergence_on_ranks_is_recorded_once(small_spec):
    spec = small_spec(*FSDP, "optim.lr=1e30", "optim.grad_clip=0")
    with pytest.raises(UserError, match="diverged at step "):
        train(spec)
    record = RunFolder(spec.path).read_record()
    assert record["status"] == "diverged"
    assert record["layers"]


@pytest.mark.slow
def test_a_job_of_a_sweep_trains_on_ranks(tmp_path, cache_dir):
    keys = command(tmp_path, cache_dir, "balancing=simbal", "trainer.max_steps=4")
    done = run("train.py", "-m", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("default/*/record.json")]) == 1
    assert (tmp_path / "default" / "table.json").exists()
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path, cache_dir):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [*launcher, str(CONF.parent / "train.py"), *command(tmp_path, cache_dir, "trainer.max_steps=4")]
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
def test_another_number_of_external_ranks_is_refused(small_spec, monkeypatch, launcher, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = small_spec(*PAIR)
    with pytest.raises(UserError, match=f"^{launcher} started 8 processes, but trainer.devices=2"):
        train(spec)
    assert not spec.path.exists()


def kill_at_call(original, when, after: bool = False):
    """Return a function that kills the run at the first call for which `when` is true, before or after it."""

    def call(*args):
        kill = when(*args)
        result = None if kill and not after else original(*args)
        if kill:
            raise KilledError
        return result

    return call


@FORKED
@pytest.mark.slow
def test_a_run_killed_in_every_phase_of_a_distributed_save_resumes_to_the_same_bits(small_spec, finished, monkeypatch):
    keys = (*FSDP, "trainer.ckpt_every=2", "trainer.max_steps=8")
    reference, killed = finished(*keys), small_spec(*keys)
    part, publish, sync = ".step-00000004.ckpt.part", strategies.publish_folder, checkpoint.sync_to_disk
    before_checksums = kill_at_call(publish, lambda _, target: "4" in target.name)
    train_killed(monkeypatch, killed, strategies, "publish_folder", before_checksums)
    assert checkpoints(killed) == [part, "step-00000002.ckpt"]
    train_killed(monkeypatch, killed, checkpoint, "sync_to_disk", kill_at_call(sync, lambda path: path.name == part))
    assert (killed.path / "checkpoints" / part / "SHA256SUMS").exists()
    published = kill_at_call(publish, lambda _, target: "6" in target.name, after=True)
    train_killed(monkeypatch, killed, strategies, "publish_folder", published)
    assert checkpoints(killed) == [f"step-{step:08d}.ckpt" for step in (2, 4, 6)]
    train_killed(monkeypatch, killed, MetricsLogger, "final_metrics", kill_at_call(None, lambda *_: True))
    assert checkpoints(killed) == ["final.ckpt", "step-00000006.ckpt", "step-00000008.ckpt"]
    train(killed)
    assert_same_run(reference, killed)
    assert checkpoints(killed) == ["final.ckpt"]
    assert RunFolder(killed.path).read_record()["warnings"] == []


@FORKED
@pytest.mark.slow
def test_a_distributed_checkpoint_is_verified_and_only_resumes_its_run(small_spec, finished, monkeypatch):
    keys = (*FSDP, "trainer.keep_every=6")
    reference, damaged = finished(*keys), small_spec(*keys)
    train_until(monkeypatch, damaged, 9)
    folder = damaged.path / "checkpoints" / "step-00000008.ckpt"
    with pytest.raises(DamagedCheckpointError, match="only resume its run"):
        checkpoint.read(folder)
    shard = folder / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9])
    train(damaged)
    assert_same_run(reference, damaged)
    assert "step-00000008.ckpt was damaged" in RunFolder(damaged.path).read_record()["warnings"][0]
    assert checkpoints(reference) == ["final.ckpt", "weights-00000006.ckpt", "weights-00000012.ckpt"]
    kept = load(reference.path / "checkpoints" / "weights-00000006.ckpt")  # one file, which analyses read
    assert not torch.equal(kept.model.head_VD, load(reference.path).model.head_VD)


def on_devices(spec, cache_dir, *keys: str):
    """Return the run to resume with other keys, as run=FOLDER does."""
    return run_to_resume(spec.path, OverridesParser.create().parse_overrides([f"data.cache_dir={cache_dir}", *keys]))


@FORKED
@pytest.mark.slow
def test_a_run_resumes_on_fewer_devices_up_to_rounding(small_spec, finished, cache_dir, monkeypatch):
    """On four ranks, six experts are split into two, two, two and none."""
    keys = (*FSDP, "trainer.devices=4", "trainer.pes_every=5", "model.num_experts=6", "balancing=[lf_lbl,ortho_param]")
    reference, moved = finished(*keys), small_spec(*keys)
    train_until(monkeypatch, moved, 5)
    train_until(monkeypatch, on_devices(moved, cache_dir, "trainer.devices=2"), 9)
    train(on_devices(moved, cache_dir, "trainer.devices=1"))
    assert_close_runs(moved, reference)
    (warning,) = RunFolder(moved.path).read_record()["warnings"]
    assert "4 from step 0, 2 from step 4, 1 from step 8" in warning


@FORKED
@pytest.mark.slow
def test_a_checkpoint_of_one_device_resumes_in_shards(small_spec, finished, cache_dir, monkeypatch):
    one = ("trainer.micro_batch=2", "balancing=lf_lbl")
    reference, moved = finished(*one), small_spec(*one)
    train_until(monkeypatch, moved, 9)
    train(on_devices(moved, cache_dir, "trainer.devices=2", "trainer.strategy=fsdp"))
    assert_close_runs(moved, reference)

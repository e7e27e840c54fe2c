"""Sweeps and runs on a local Slurm cluster of two nodes: a job runs out of time, and a node goes down."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simbal.runs.folder import RunFolder
from simbal.training.run import train
from tests.child_processes import holder, wait_until
from tests.conftest import CONF, MARKOV, SMALL
from tests.programs import Program
from tests.sweep.slurm_machine import NODES, SlurmMachine, missing, slurm_machine
from tests.sweep.small_sweep import curve
from tests.training.run_files import assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1")
LONG = ("trainer.max_steps=300", "trainer.ckpt_every=10", "trainer.val_every=300", "trainer.log_every=10")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmMachine]:
    with slurm_machine() as machine:
        yield machine


def start_steps(folder) -> list[int]:
    """Return the step at which each process of a run started."""
    log = (folder / "train.log").read_text()
    return [int(line.split("from step ")[1].split()[0]) for line in log.splitlines() if "from step" in line]


def suspend_jobs(folder, suspended: dict[str, int]) -> bool:
    """Suspend each job that has a checkpoint, and note it by its node; return whether both are suspended."""
    for run in {file.parents[1] for file in folder.glob("outputs/default/*/checkpoints/step-*.ckpt")}:
        pid = holder(run / ".lock")
        if pid and pid not in suspended.values():
            os.kill(pid, signal.SIGSTOP)
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            suspended[dict(line.split("=", 1) for line in variables if line)["SLURMD_NODENAME"]] = pid
    return len(suspended) == 2


def has_pending_signal(pid: int) -> bool:
    """Return whether a suspended process has received a signal."""
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd"))
    return int(mask.split()[1], 16) != 0


def test_jobs_that_run_out_of_time_or_lose_their_node_resume(slurm, tmp_path, cache_dir, small_spec):
    whole = small_spec(*LONG, output_dir=tmp_path / "whole")
    train(whole)
    places = (f"output_dir={tmp_path / 'outputs'}", f"data.cache_dir={cache_dir}")
    keys = ("-m", *SMALL, *MARKOV, *LONG, *places, *LAUNCHER, "seed=0-1")
    sweep, suspended = Program("train.py", *keys, cwd=tmp_path, **slurm.environment), dict[str, int]()
    wait_until(lambda: sweep.poll() is not None or suspend_jobs(tmp_path, suspended))
    late, lost = (suspended[node] for node in NODES)
    job_on = dict(line.split() for line in slurm.run("squeue", "-h", "-r", "-o", "%N %i").splitlines())
    slurm.run("scancel", "--signal=USR2", job_on[NODES[0]])  # as Slurm warns of the time limit
    slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: has_pending_signal(late))
    os.kill(late, signal.SIGCONT)
    out, err = sweep.communicate()
    slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=resume")
    assert sweep.returncode == 0, out + err
    folders = sorted(path.parent for path in tmp_path.glob("outputs/default/*/record.json"))
    assert [RunFolder(folder).read_record()["status"] for folder in folders] == ["finished"] * 2
    assert [len(start_steps(folder)) for folder in folders] == [2, 2]
    assert min(start_steps(folder)[1] for folder in folders) > 0
    assert_same_run(whole, RunFolder(folders[0]).read_spec())
    assert (folders[0].parent / "table.json").exists()


def test_jobs_that_slurm_rejects_are_one_error(slurm, app):
    rejected = app.run("-m", "seed=0-1", *LAUNCHER, "hydra.launcher.partition=nowhere", **slurm.environment)
    assert (rejected.returncode, app.started) == (1, [])
    assert rejected.stderr.startswith("error: hydra/launcher=slurm: sbatch rejects the jobs: ")
    assert "invalid partition specified: nowhere" in rejected.stderr
    assert rejected.stderr.count("\n") == 1


def test_tasks_of_srun_are_the_ranks_of_a_run(slurm, tmp_path, cache_dir, small_spec, forked_ranks):
    keys = ("trainer.devices=2", "trainer.micro_batch=2")
    ours = small_spec(*keys, output_dir=tmp_path / "ours")
    train(ours)
    places = (f"data.cache_dir={cache_dir}", f"output_dir={tmp_path / 'srun'}")
    program = (sys.executable, str(CONF.parent / "train.py"), *SMALL, *MARKOV, *keys, *places)
    printed = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", *program)
    assert printed.count("val/ppl") == 1
    (file,) = tmp_path.glob("srun/**/metrics.jsonl")
    assert curve(file) == curve(ours.path / "metrics.jsonl")

"""Sweeps and runs on a Slurm of two nodes: jobs run out of time, nodes go away, and nothing is lost."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simbal.runs.folder import RunFolder
from simbal.training.run import train
from tests import programs
from tests.child_processes import holder, wait_until
from tests.conftest import CONF, MARKOV, SMALL
from tests.sweep.slurm_machine import NODES, SlurmMachine, missing, slurm_machine
from tests.sweep.small_sweep import curve
from tests.sweep.test_ray import LONG, begun, starts
from tests.training.run_files import assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmMachine]:
    with slurm_machine() as machine:
        yield machine


def hold_begun(folder, held: dict[str, int]) -> bool:
    """Stop each process of a sweep that has written a checkpoint, and note it by its node; whether two are held."""
    for run in begun(folder):
        pid = holder(folder / "outputs" / "default" / run / ".lock")
        if pid and pid not in held.values():
            os.kill(pid, signal.SIGSTOP)
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            held[dict(line.split("=", 1) for line in variables if line)["SLURMD_NODENAME"]] = pid
    return len(held) == 2


def pending(pid: int) -> int:
    """The signals that a process which is stopped has been sent, a bit for each."""
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd"))
    return int(mask.split()[1], 16)


def test_runs_that_are_out_of_time_or_lose_their_node_go_on_from_where_they_were(
    slurm, tmp_path, cache_dir, small_spec
):
    whole = small_spec(*LONG, output_dir=tmp_path / "whole")
    train(whole)
    places = (f"output_dir={tmp_path / 'outputs'}", f"data.cache_dir={cache_dir}")
    keys = ("-m", *SMALL, *MARKOV, *LONG, *places, *LAUNCHER, "seed=0-1")
    sweep, held = programs.Program("train.py", *keys, cwd=tmp_path, **slurm.environment), dict[str, int]()
    wait_until(lambda: sweep.poll() is not None or hold_begun(tmp_path, held))
    late, lost = (held[node] for node in NODES)
    job_on = dict(line.split() for line in slurm.run("squeue", "-h", "-r", "-o", "%N %i").splitlines())
    slurm.run("scancel", "--signal=USR2", job_on[NODES[0]])  # Slurm's warning of the time limit
    slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: pending(late))
    os.kill(late, signal.SIGCONT)
    out, said = sweep.communicate()
    slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=resume")
    assert sweep.returncode == 0, out + said
    folders = sorted(path.parent for path in tmp_path.glob("outputs/default/*/record.json"))
    assert [RunFolder(folder).read_record()["status"] for folder in folders] == ["finished"] * 2
    assert [len(starts(folder)) for folder in folders] == [2, 2]
    assert min(starts(folder)[1] for folder in folders) > 0
    assert_same_run(whole, RunFolder(folders[0]).read_spec())
    assert (folders[0].parent / "table.json").exists()


def test_what_slurm_does_not_take_is_one_sentence(slurm, app):
    refused = app.run("-m", "seed=0-1", *LAUNCHER, "hydra.launcher.partition=nowhere", **slurm.environment)
    assert (refused.returncode, app.started) == (1, [])
    assert refused.stderr.startswith("error: hydra/launcher=slurm: sbatch takes no jobs: ")
    assert "invalid partition specified: nowhere" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_tasks_of_srun_are_the_ranks_of_a_run(slurm, tmp_path, cache_dir):
    keys = (*SMALL, *MARKOV, f"data.cache_dir={cache_dir}", "trainer.devices=2", "trainer.micro_batch=2")
    started_by_us, started_by_srun = tmp_path / "a", tmp_path / "b"
    assert programs.run("train.py", *keys, f"output_dir={started_by_us}", cwd=tmp_path).returncode == 0
    train = (sys.executable, str(CONF.parent / "train.py"), *keys, f"output_dir={started_by_srun}")
    printed = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", *train)
    assert printed.count("val/ppl") == 1

    def files(folder):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    assert files(started_by_srun) == files(started_by_us)
    curves = [[curve(file) for file in folder.rglob("metrics.jsonl")] for folder in (started_by_us, started_by_srun)]
    assert curves[0] == curves[1]

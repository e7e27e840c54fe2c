"""Sweeps on Ray clusters of several nodes on this machine: a node or a job goes away, and nothing is lost."""

import json
import os
import signal
from contextlib import contextmanager, suppress

import pytest

from simbal.runs.folder import RunFolder
from simbal.training.run import train
from tests.child_processes import holder, wait_until
from tests.conftest import MARKOV, SMALL
from tests.programs import Program
from tests.sweep.conftest import PRETENDING
from tests.sweep.ray_cluster import cluster_of
from tests.training.run_files import assert_same_run

pytestmark = pytest.mark.slow
LONG = ("trainer.max_steps=300", "trainer.ckpt_every=10", "trainer.val_every=300", "trainer.log_every=1")


@pytest.fixture
def sweep(tmp_path, cache_dir):
    """`sweep(cluster, "seed=0-1")`: the process of a sweep of small runs there."""

    def start(cluster, *keys: str) -> Program:
        places = (f"output_dir={tmp_path / 'outputs'}", f"data.cache_dir={cache_dir}")
        ray = ("hydra/launcher=ray", f"hydra.launcher.address={cluster.address}")
        return Program("train.py", "-m", *SMALL, *MARKOV, *places, *ray, *keys, cwd=tmp_path)

    return start


def starts(folder) -> list[int]:
    """The step at which each process of a run has started."""
    log = (folder / "train.log").read_text()
    return [int(line.split("from step ")[1].split()[0]) for line in log.splitlines() if "from step" in line]


def begun(folder) -> set[str]:
    """The runs that have a checkpoint."""
    return {file.parts[-3] for file in folder.glob("outputs/default/*/checkpoints/step-*.ckpt")}


@contextmanager
def waiting(running, folder, runs: int):
    """Within the block so many runs wait, each since its first checkpoint: none is done before others have begun."""
    held = dict[str, int]()

    def hold() -> int:
        for run in begun(folder) - held.keys():
            if pid := holder(folder / "outputs/default" / run / ".lock"):
                held[run] = pid
                os.kill(pid, signal.SIGSTOP)
        return len(held)

    try:
        wait_until(lambda: running.poll() is not None or hold() >= runs)
        yield
    finally:
        for pid in held.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_run_whose_node_is_taken_away_is_done_on_another_from_where_it_was(sweep, tmp_path, small_spec):
    whole = small_spec(*LONG, output_dir=tmp_path / "whole")
    train(whole)
    with cluster_of(2) as cluster:
        running = sweep(cluster, *LONG, "seed=0-1")
        with waiting(running, tmp_path, runs=2):
            cluster.lose_node()
        out, said = running.communicate()
    assert running.returncode == 0, out + said
    folders = sorted(path.parent for path in tmp_path.glob("outputs/default/*/record.json"))
    assert [RunFolder(folder).read_record()["status"] for folder in folders] == ["finished"] * 2
    (again,) = [steps for steps in map(starts, folders) if len(steps) == 2]
    assert again[1] > 0
    (first,) = [folder for folder in folders if "seed0" in folder.name]
    assert_same_run(whole, RunFolder(first).read_spec())
    assert (folders[0].parent / "table.json").exists()


def refused(app, *keys, says):
    """The sweep says why it cannot be, and leaves no run behind."""
    before = {*app.folder.glob("outputs/*/*/config.yaml")}
    done = app.run(*keys, "seed=0-1", "balancing=none")
    assert done.returncode == 1
    assert says in done.stderr
    assert {*app.folder.glob("outputs/*/*/config.yaml")} == before


def test_jobs_that_crash_are_killed_or_are_stopped_leave_the_others_alone_and_are_gone_on_with(app):
    """And what no node can do, or an address where no cluster is, is one sentence."""
    with cluster_of(2, PYTHONPATH=PRETENDING) as cluster:
        ray = ("-m", "hydra/launcher=ray", f"hydra.launcher.address={cluster.address}", "trainer.accelerator=cpu")
        refused(
            app, *ray, "hydra.launcher.num_cpus=64", says="no node of the Ray cluster has 64 CPUs and 0 GPUs for a job"
        )
        both = "hydra.launcher.num_cpus=0 and hydra.launcher.num_gpus=0 must be at least 0"
        refused(app, *ray, "hydra.launcher.num_cpus=0", says=both)

        app.behave({1: "crash", 2: "die", 4: "forestalled"})
        done = app.run(*ray, "seed=0-4")
        assert done.returncode == 1
        assert done.stderr.endswith("2 of 5 jobs failed\n"), done.stderr
        ends = [app.record(seed)["status"] for seed in range(5)]
        assert ends == ["finished", "failed", "killed", "finished", "finished"]
        assert app.started == [0, 1, 2, 3, 4, 4]
        assert {json.loads(line)["threads"] for line in app.lines("started")} == {"1"}

        app.behave({2: "hang"})
        hanging = app.start(*ray, "seed=0-4")
        app.wait_until(lambda: len(app.lines("hanging")) == 2)
        hanging.send_signal(signal.SIGINT)
        hanging.communicate()
        assert hanging.returncode == 130
        app.wait_until(lambda: not any(app.alive(int(pid)) for pid in app.lines("hanging")))

        app.behave({})
        again = app.run(*ray, "seed=0-4", "retry_failed=true")
        assert again.returncode == 0, again.stderr
        assert again.stdout.startswith("3 finished, 2 resumed, 0 new\n")
        assert os.fspath(app.folder) not in again.stderr
    refused(app, *ray, says=f"{ray[2]}: no Ray cluster answers there")

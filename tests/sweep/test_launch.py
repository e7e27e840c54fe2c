"""A sweep from the command line to the table: each job is a process, and its record decides the outcome."""

import os
import signal
import sys
from pathlib import Path

import pytest

from simbal.runs.folder import CONSOLE_FILE, RunFolder
from simbal.sweeping.worker import make_task, work
from tests.child_processes import in_a_fork

NO_FLOCK = str(Path(__file__).parents[1] / "no_flock")  # for PYTHONPATH
NEW_PYTHONS = "hydra.launcher.preload=null"
ENDS = {  # behaviour, status and error by seed
    1: ("crash", "failed", "RuntimeError: the loss is nan"),
    2: ("die", "killed", "killed by signal 9, possibly out of memory"),
    3: ("refuse", "failed", "no space left"),
    4: ("diverge", "diverged", "the gradient was NaN"),
    5: ("stop", "killed", "killed by signal 15"),
    6: ("fault", "killed", "killed by signal 11"),
    7: ("starve", "failed", "MemoryError: cannot allocate"),
    8: ("leave", "failed", "ended with exit code 0 and no result"),
}


def assert_ends(app, sweep):
    assert sweep.returncode == 1
    assert sweep.stdout.startswith("0 finished, 0 resumed, 9 new\n")
    assert sweep.stderr == "8 of 9 jobs failed\n"
    assert app.started == [*range(9)]
    for seed, (_, status, error) in ENDS.items():
        assert (app.record(seed)["status"], app.record(seed)["error"]) == (status, error)
        assert error in sweep.stdout
    console = (app.run_folder(1) / CONSOLE_FILE).read_text()
    assert "this goes to console.log" in console
    assert "Traceback (most recent call last):" in console
    (arm,) = app.table()["arms"]
    assert [run["seed"] for run in arm["runs"]] == [0]


def test_failed_jobs_do_not_affect_others_and_are_repeated_on_request(app):
    app.behave({seed: behaviour for seed, (behaviour, _, _) in ENDS.items()})
    assert_ends(app, app.run("-m", "seed=0-8"))
    app.behave()
    resumed = app.run("-m", "seed=0-9")  # killed runs are resumed without a request
    assert resumed.returncode == 1
    counts = "1 finished, 5 failed before (retry_failed=true tries again), 3 resumed, 1 new\n"
    assert resumed.stdout.startswith(counts)
    assert resumed.stderr == "5 of 10 jobs failed\n"
    again = app.run("-m", "seed=0-9", "retry_failed=true")
    assert again.returncode == 0
    assert again.stdout.startswith("5 finished, 5 resumed, 0 new\n")
    assert app.started == sorted([*range(10), *ENDS])
    same = app.run("-m", "seed=0-9")
    assert same.stdout.startswith("10 finished, 0 resumed, 0 new\n")
    assert len(app.started) == 18
    assert same.stdout.partition("default:")[2] == again.stdout.partition("default:")[2] != ""


@pytest.mark.slow
def test_jobs_in_new_pythons_end_in_the_same_ways(app):
    app.behave({seed: behaviour for seed, (behaviour, _, _) in ENDS.items()})
    assert_ends(app, app.start("-m", "seed=0-8", NEW_PYTHONS).completed())


def test_changed_data_is_refused_before_any_job_starts(app):
    app.run("-m", "seed=0")
    before = (app.folder / "outputs/default/sweep.json").read_bytes()
    app.behave(tokens="c")
    again = app.run("-m", "seed=0-1")
    assert again.returncode == 1
    assert "was trained on other data (tokens b, now c)" in again.stderr
    others = app.run("-m", "seed=1")
    assert "outputs/default contains runs on other data" in others.stderr
    assert (app.folder / "outputs/default/sweep.json").read_bytes() == before
    assert app.started == [0]


def test_a_folder_of_another_config_is_refused_by_the_sweep_and_by_its_job(app, monkeypatch):
    app.run("-m", "seed=0")
    folder = RunFolder(app.run_folder(0))
    monkeypatch.chdir(app.folder)
    task = make_task(folder.read_spec(), None)
    config = folder.path / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 5"))
    sweep = app.run("-m", "seed=0-1")
    assert (sweep.returncode, app.started) == (1, [0])
    assert "belongs to another config" in sweep.stderr

    def job() -> None:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os._exit(work(task))

    assert in_a_fork(job) == 1
    (error,) = [line for line in (folder.path / CONSOLE_FILE).read_text().splitlines() if line.startswith("error: ")]
    assert "belongs to another config" in error


def test_a_run_with_a_damaged_record_is_repeated(app):
    first = app.run("-m", "seed=0-1")
    file = app.run_folder(1) / "record.json"
    damaged = file.read_bytes().replace(b'"tokens_per_second": 3.0', b'"tokens_per_second": 7.0')
    file.write_bytes(damaged)
    assert app.run("-m", "seed=0-1", "dry_run=true").returncode == 0
    assert file.read_bytes() == damaged
    again = app.run("-m", "seed=0-1")
    assert again.returncode == 0, again.stderr
    assert f"{file.relative_to(app.folder)} is damaged (" in again.stdout
    assert "1 finished, 1 resumed, 0 new\n" in again.stdout
    assert app.started == [0, 1, 1]
    assert file.with_name("record.json.damaged").read_bytes() == damaged
    assert first.stdout.partition("default:")[2] == again.stdout.partition("default:")[2]


def test_a_run_that_another_process_writes_is_waited_for(app):
    app.behave({0: "die", 1: "locked once"})
    app.run("-m", "seed=0")
    folder = RunFolder(app.run_folder(0))
    with folder.lock():
        sweep = app.start("-m", "seed=0-1", "hydra.launcher.n_jobs=1")
        app.wait_until(lambda: app.started == [0, 1, 1] and (app.run_folder(1) / "record.json").exists())
        folder.write_record(app.record(1) | {"config_hash": folder.read_spec().hash, "seed": 0})
    out, _ = sweep.communicate()
    assert sweep.returncode == 0
    assert "locked  seed=0\n" in out
    assert "locked  seed=1\n" in out
    assert app.started == [0, 1, 1]


@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": NO_FLOCK}], ids=["flock", "marker"])
def test_two_sweeps_over_one_folder_do_every_run_once(app, environment):
    sweeps = [app.start("-m", "seed=0-5", "hydra.launcher.n_jobs=2", **environment) for _ in range(2)]
    outs = [sweep.communicate() for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outs
    assert "Traceback" not in str(outs)
    assert sorted(app.lines("finished")) == [*"012345"]
    (arm,) = app.table()["arms"]
    assert [run["seed"] for run in arm["runs"]] == [*range(6)]
    assert not list(app.folder.glob("outputs/default/*/*.held"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_sweep_stops_its_jobs_and_can_be_resumed(app, number, code):
    app.behave({1: "hang", 2: "hang"})
    sweep = app.start("-m", "seed=0-3", "hydra.launcher.n_jobs=2")
    app.wait_until(lambda: len(app.hanging) == 4)
    sweep.send_signal(number)
    out, _ = sweep.communicate()
    assert sweep.returncode == code
    assert "stopped: 1 done, 2 interrupted, 1 not started." in out
    assert ("default: mean" in out) == (number == signal.SIGINT)  # Ctrl-C prints the table
    assert app.started == [0, 1, 2]
    assert not any(app.alive(pid) for pid in app.hanging)
    assert [*app.folder.glob("outputs/*/*/record.json")] == [app.run_folder(0) / "record.json"]
    app.behave()
    resumed = app.run("-m", "seed=0-3").stdout
    assert resumed.startswith("1 finished, 2 resumed, 1 new\n")
    assert "done    seed=1 in 1:40" in resumed  # the total time, from the record


@pytest.mark.parametrize("preload", ["hydra.launcher.preload=[]", pytest.param(NEW_PYTHONS, marks=pytest.mark.slow)])
def test_a_killed_sweep_leaves_no_process_behind(app, preload):
    app.behave({0: "hang", 1: "hang"})
    sweep = app.start("-m", "seed=0-1", "hydra.launcher.n_jobs=2", preload)
    app.wait_until(lambda: len(app.hanging) == 4)
    sweep.kill()
    sweep.communicate()
    app.wait_until(lambda: not any(app.alive(pid) for pid in app.hanging))


def test_a_named_sweep_of_another_folder_reaches_the_jobs(app):
    sweeps = app.folder / "mine" / "sweeps"
    sweeps.mkdir(parents=True)
    (sweeps / "pair.yaml").write_text(
        "# @package _global_\nname: pair\nhydra: {sweeper: {params: {seed: 3-4, balancing: 'lbl,simbal'}}}\n"
    )
    sweep = app.run("--config-dir=mine", "-m", "sweeps=pair", "balancing=lbl", "trainer.max_steps=50")
    assert sweep.returncode == 0, sweep.stderr
    assert app.started == [3, 4]
    spec = RunFolder(app.run_folder(3, "pair")).read_spec()
    assert (spec.config.trainer.max_steps, spec.choices["balancing"]) == (50, "lbl")


def test_slurm_starts_nothing_in_a_dry_run_and_must_be_installed(app):
    slurm = ("-m", "seed=0-1", "hydra/launcher=slurm", "hydra.launcher.partition=gpu")
    dry = app.run(*slurm, "dry_run=true")
    assert (dry.returncode, app.started) == (0, [])
    assert "0 finished, 0 resumed, 2 new" in dry.stdout
    assert not (app.folder / "outputs").exists()
    sweep = app.run(*slurm, PATH=str(Path(sys.executable).parent))
    assert (sweep.returncode, app.started) == (1, [])
    assert sweep.stderr.startswith('error: hydra/launcher=slurm: Could not detect "srun"'), sweep.stderr

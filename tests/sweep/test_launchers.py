"""Sweeps by launchers that are not ours: the same command, and the folders say what came of it."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.cli.hydra_keys import EXTRAS, PACKAGES, check_launcher
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from tests.child_processes import wait_until
from tests.conftest import CONF, MARKOV, SMALL

JOBLIB, SUBMITIT = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), ("hydra/launcher=submitit_local",)
RAY = pytest.param(
    ("hydra/launcher=ray",),
    id="ray",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            find_spec("hydra_plugins.hydra_ray_launcher") is None,
            reason="Ray's launcher wants cloudpickle<3, the pinned joblib cloudpickle>=3",
        ),
    ],
)
ALL = pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(JOBLIB, id="joblib", marks=pytest.mark.slow),
        pytest.param(SUBMITIT, id="submitit_local", marks=pytest.mark.slow),
        pytest.param(("hydra/launcher=basic",), id="basic"),
        RAY,
    ],
)
ONES_THAT_SURVIVE_A_KILL = pytest.mark.parametrize(
    "launcher", [pytest.param(SUBMITIT, id="submitit_local", marks=pytest.mark.slow), RAY]
)


def statuses(app):
    """The record's status of each run, by folder name without the hash."""
    folders = sorted(path.parent for path in app.folder.glob("outputs/default/*/config.yaml"))
    records = {folder.name.rpartition("-")[0]: folder / "record.json" for folder in folders}
    return {name: json.loads(file.read_text())["status"] if file.exists() else None for name, file in records.items()}


@ALL
def test_a_crash_is_in_the_table_and_only_what_is_missing_is_run_again(app, launcher):
    command = ("-m", "balancing=simbal,lbl", "seed=0-1", *launcher)
    app.behave({1: "crash"})
    first = app.run(*command)
    assert (first.returncode, app.started) == (1, [0, 0, 1, 1]), first.stderr
    assert first.stdout.startswith("0 finished, 0 resumed, 4 new\ngiven to hydra/launcher=")
    assert first.stderr.endswith("2 of 4 jobs failed\n")
    assert first.stdout.count("RuntimeError: the loss is nan") == 2
    assert set(statuses(app).values()) == {"finished", "failed"}
    (console,) = app.folder.glob("outputs/default/lbl*seed1-*/console.log")
    assert "this goes to console.log" in console.read_text()
    assert "this goes to console.log" not in first.stdout
    assert {json.loads(line)["threads"] for line in app.lines("started")} == {"1"}
    assert app.lines("prepared") == ["0"]

    app.behave({})
    again = app.run(*command, "retry_failed=true")
    assert (again.returncode, app.started) == (0, [0, 0, 1, 1, 1, 1]), again.stderr
    assert again.stdout.startswith("2 finished, 2 resumed, 0 new\n")
    arms = json.loads((app.folder / "outputs/default/table.json").read_text())["arms"]
    assert [[run["seed"] for run in arm["runs"]] for arm in arms] == [[0, 1], [0, 1]]

    finished = app.run(*command)
    assert (finished.returncode, len(app.started)) == (0, 6)
    assert finished.stdout.startswith("4 finished, 0 resumed, 0 new\n")
    assert "\ndefault: mean" in finished.stdout


@ALL
def test_a_job_that_refuses_leaves_the_others_alone(app, launcher):
    app.behave({0: "refuse"})
    sweep = app.run("-m", "seed=0-2", *launcher)
    assert (sweep.returncode, app.started) == (1, [0, 1, 2])
    assert app.record(0)["error"] == "no space left"
    assert [app.record(seed)["status"] for seed in (1, 2)] == ["finished", "finished"]


@ONES_THAT_SURVIVE_A_KILL
def test_a_killed_job_is_unfinished_the_others_are_waited_for_and_it_is_gone_on_with(app, launcher):
    app.behave({0: "die"})
    sweep = app.run("-m", "seed=0-3", *launcher)
    assert sweep.returncode == 1
    assert "1 of 4 jobs failed" in sweep.stderr
    assert "unfinished" in sweep.stdout
    assert [*statuses(app).values()] == [None, "finished", "finished", "finished"]
    app.behave({})
    assert app.run("-m", "seed=0-3", *launcher).stdout.startswith("3 finished, 1 resumed, 0 new\n")
    assert [*statuses(app).values()] == ["finished"] * 4


@pytest.mark.slow
def test_joblib_loses_the_jobs_that_are_left_with_a_killed_one_and_the_next_sweep_goes_on(app):
    app.behave({0: "die"})
    sweep = app.run("-m", "seed=0-3", *JOBLIB)
    assert sweep.returncode == 1
    assert "hydra/launcher=joblib: TerminatedWorkerError: " in sweep.stdout
    assert "unfinished" in sweep.stdout
    app.behave({})
    assert app.run("-m", "seed=0-3", *JOBLIB).returncode == 0
    assert [*statuses(app).values()] == ["finished"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_sweep_stops_joblibs_jobs_and_marks_none_as_failed(app, number, code):
    app.behave({0: "hang", 1: "hang"})
    sweep = app.start("-m", "seed=0-3", *JOBLIB)
    app.wait_until(lambda: len(app.lines("hanging")) == 4)
    sweep.send_signal(number)
    sweep.communicate()
    assert sweep.returncode == code
    jobs = {json.loads(line)["pid"] for line in app.lines("started")}
    app.wait_until(lambda: not any(app.alive(pid) for pid in jobs))
    assert set(statuses(app).values()) == {None}


@ALL
def test_a_job_that_another_process_has_forestalled_is_no_failure_and_is_done_once_that_lets_go(app, launcher):
    app.behave({1: "forestalled"})
    sweep = app.run("-m", "seed=0-1", *launcher)
    assert sweep.returncode == 0, sweep.stderr
    assert "elsewhere seed=1: another process is at it" in sweep.stdout
    assert app.started == [0, 1, 1]
    assert app.record(1)["status"] == "finished"


@pytest.mark.slow
def test_a_run_that_another_process_is_writing_is_waited_for_and_not_given_away(app):
    app.behave({0: "die"})
    app.run("-m", "seed=0")
    app.behave({})
    folder = RunFolder(app.run_folder(0))
    with folder.lock():
        sweep = app.start("-m", "seed=0-1", *JOBLIB)
        app.wait_until(lambda: (app.run_folder(1) / "record.json").exists() if app.started == [0, 1] else False)
        folder.write_record(app.record(1) | {"config_hash": folder.read_spec().hash, "seed": 0})
    out, err = sweep.communicate()
    assert (sweep.returncode, app.started) == (0, [0, 1]), err
    assert out.count("elsewhere seed=0: ") == 1


def test_a_dry_run_gives_nothing_away(app):
    sweep = app.run("-m", "seed=0-1", "dry_run=true", *SUBMITIT)
    assert (sweep.returncode, app.started) == (0, [])
    assert "0 finished, 0 resumed, 2 new" in sweep.stdout
    assert not (app.folder / "outputs").exists()


def test_a_launcher_that_cannot_start_says_why_and_leaves_all_unfinished(app):
    sweep = app.run("-m", "seed=0-1", "hydra/launcher=slurm", "hydra.launcher.partition=gpu")
    assert (sweep.returncode, app.started) == (1, [])
    assert 'hydra/launcher=slurm: RuntimeError: Could not detect "srun"' in sweep.stdout
    assert sweep.stderr.endswith("2 of 2 jobs failed\n")


@pytest.mark.parametrize("name", [*EXTRAS])
def test_a_launcher_that_is_not_installed_is_named_with_its_remedy(name, monkeypatch):
    overrides = OverridesParser.create().parse_overrides([f"hydra/launcher={name}"])
    monkeypatch.setattr("simbal.cli.hydra_keys.find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"hydra/launcher={name} is not installed: pip install 'simbal\[.*\]'"):
        check_launcher(overrides)
    assert EXTRAS[name] in PACKAGES


@pytest.mark.slow
def test_a_job_of_submitit_that_is_pre_empted_is_queued_again_and_goes_on_from_where_it_was(tmp_path, cache_dir):
    """With the signal that Slurm sends first; submitit's own executor of this machine queues as Slurm does."""
    long = ("trainer.max_steps=400", "trainer.ckpt_every=100000", "trainer.val_every=400")
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    command = [sys.executable, CONF.parent / "train.py", "-m", *SMALL, *MARKOV, *long, *places, *SUBMITIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as sweep:
        wait_until(lambda: sweep.poll() is not None or any(tmp_path.glob("default/*/progress.json")))
        (lock,) = tmp_path.glob("default/*/.lock")
        os.kill(int(lock.read_text().split()[1]), signal.SIGUSR2)
        out, _ = sweep.communicate()
    assert sweep.returncode == 0, out
    (log,) = tmp_path.glob("default/*/train.log")
    starts = [line.split("from step ")[1].split()[0] for line in log.read_text().splitlines() if "from step" in line]
    assert len(starts) == 2, log.read_text()
    assert int(starts[1]) > 0
    (record,) = tmp_path.glob("default/*/record.json")
    assert json.loads(record.read_text())["status"] == "finished"

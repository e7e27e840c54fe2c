"""A sweep from the command line to the table: each job in its own process, judged by its record alone."""

import json
import signal
from pathlib import Path

import pytest

from simbal.runs.folder import RunFolder
from tests.sweep.conftest import BOTH_STARTS

NO_FLOCK = str(Path(__file__).parents[1] / "no_flock")  # for PYTHONPATH


def hanging(app):
    """Process ids of jobs that hang, and of what they started."""
    return [int(pid) for pid in app.lines("hanging")]


@BOTH_STARTS
def test_jobs_that_crash_are_killed_or_refuse_leave_the_others_alone(app, preload):
    ends = {
        1: ("crash", "failed", "RuntimeError: the loss is nan"),
        2: ("die", "killed", "killed by signal 9, possibly out of memory"),
        3: ("refuse", "failed", "no space left"),
        5: ("stop", "killed", "killed by signal 15"),
        6: ("fault", "killed", "killed by signal 11"),
        7: ("starve", "failed", "MemoryError: cannot allocate"),
        8: ("leave", "failed", "ended with exit code 0 and no result"),
    }
    app.behave({seed: behaviour for seed, (behaviour, _, _) in ends.items()})
    sweep = app.run("-m", "seed=0-8", preload=preload)
    assert sweep.returncode == 1
    assert sweep.stdout.startswith("0 finished, 0 resumed, 9 new\n")
    assert sweep.stderr == "7 of 9 jobs failed\n"
    assert app.started == [*range(9)]
    for seed, (_, status, error) in ends.items():
        assert (app.record(seed)["status"], app.record(seed)["error"]) == (status, error)
        assert error in sweep.stdout
    assert "this goes to console.log" in (app.run_folder(1) / "console.log").read_text()
    (arm,) = json.loads((app.folder / "outputs/default/table.json").read_text())["arms"]
    assert [run["seed"] for run in arm["runs"]] == [0, 4]


def test_a_failed_job_is_run_again_if_that_is_asked_for_and_a_finished_one_is_not(app):
    app.behave({1: "crash"})
    app.run("-m", "seed=0-1")
    app.behave({})
    left = app.run("-m", "seed=0-2")
    assert left.returncode == 1
    assert left.stdout.startswith("1 finished, 1 failed before (retry_failed=true tries again), 0 resumed, 1 new\n")
    assert "the loss is nan" in left.stdout
    assert left.stderr == "1 of 3 jobs failed\n"
    again = app.run("-m", "seed=0-2", "retry_failed=true")
    assert again.returncode == 0
    assert again.stdout.startswith("2 finished, 1 resumed, 0 new\n")
    assert app.started == [0, 1, 1, 2]
    assert app.record(1)["status"] == "finished"


def test_a_killed_job_is_gone_on_with_unasked(app):
    app.behave({1: "die"})
    app.run("-m", "seed=0-1")
    app.behave({})
    assert app.run("-m", "seed=0-1").stdout.startswith("1 finished, 1 resumed, 0 new\n")
    assert app.started == [0, 1, 1]
    assert app.record(1)["status"] == "finished"


def test_the_same_command_starts_nothing_and_prints_the_same_table(app):
    first = app.run("-m", "seed=0-1")
    again = app.run("-m", "seed=0-1")
    assert again.stdout.startswith("2 finished, 0 resumed, 0 new\n")
    assert app.started == [0, 1]
    assert first.stdout.partition("default:")[2] == again.stdout.partition("default:")[2] != ""


def test_a_run_finished_on_data_that_have_changed_since_is_refused_before_any_job_starts(app):
    app.run("-m", "seed=0")
    said = (app.folder / "outputs/default/sweep.json").read_bytes()
    app.behave({}, tokens="c")
    again = app.run("-m", "seed=0-1")
    assert again.returncode == 1
    assert (app.folder / "outputs/default/sweep.json").read_bytes() == said
    assert "was trained on other data (tokens b, now c): move it away, or choose another name=" in again.stderr
    assert app.started == [0]


def test_every_job_is_checked_before_the_first_starts(app):
    sweep = app.run("-m", "model.top_k=4,99")
    assert sweep.returncode == 2
    assert "model.top_k=99" in sweep.stderr
    assert app.started == []
    assert not (app.folder / "outputs").exists()


def test_a_folder_of_another_config_is_refused_before_any_job_starts(app):
    app.run("-m", "seed=0")
    config = app.run_folder(0) / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 5"))
    sweep = app.run("-m", "seed=0-1")
    assert (sweep.returncode, app.started) == (1, [0])
    assert "belongs to another config" in sweep.stderr


def test_a_run_that_another_process_is_writing_is_waited_for_and_left_alone(app):
    app.behave({0: "die"})
    app.run("-m", "seed=0")
    app.behave({})
    folder = RunFolder(app.run_folder(0))
    with folder.lock():
        sweep = app.start("-m", "seed=0-1", "hydra.launcher.n_jobs=1")
        app.wait_until(lambda: (app.run_folder(1) / "record.json").exists() if app.started == [0, 1] else False)
        folder.write_record(app.record(1) | {"config_hash": folder.read_spec().hash, "seed": 0})
    out, _ = sweep.communicate()
    assert sweep.returncode == 0
    assert "elsewhere seed=0" in out
    assert app.started == [0, 1]


@BOTH_STARTS
def test_a_job_that_another_process_has_forestalled_is_no_failure_and_is_done_once_that_lets_go(app, preload):
    app.behave({1: "forestalled"})
    sweep = app.run("-m", "seed=0-1", preload=preload)
    assert sweep.returncode == 0, sweep.stderr
    assert "elsewhere seed=1\n" in sweep.stdout
    assert app.started == [0, 1, 1]
    assert app.record(1)["status"] == "finished"


@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": NO_FLOCK}], ids=["flock", "marker"])
def test_two_sweeps_at_once_over_one_folder_do_every_run_once(app, environment):
    sweeps = [app.start("-m", "seed=0-7", "hydra.launcher.n_jobs=2", **environment) for _ in range(2)]
    outs = [sweep.communicate() for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outs
    assert "Traceback" not in str(outs)
    assert len(set(app.started)) == 8
    assert all(app.record(seed)["status"] == "finished" for seed in range(8))
    assert len(app.lines("finished")) == 8
    (arm,) = json.loads((app.folder / "outputs/default/table.json").read_text())["arms"]
    assert [run["seed"] for run in arm["runs"]] == [*range(8)]
    assert len(list(app.folder.glob("outputs/default/*/.lock"))) == 8
    assert not list(app.folder.glob("outputs/default/*/*.held"))


def test_a_named_sweep_and_another_config_reach_the_jobs(app):
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_sweep_stops_its_jobs_and_marks_none_as_failed(app, number, code):
    app.behave({0: "hang", 1: "hang"})
    sweep = app.start("-m", "seed=0-3", "hydra.launcher.n_jobs=2")
    app.wait_until(lambda: len(hanging(app)) == 4)
    sweep.send_signal(number)
    out, _ = sweep.communicate()
    assert sweep.returncode == code
    assert "Traceback" not in out
    said = "stopped: 0 done, 2 stopped, 2 not begun; nothing that is saved is lost: the same command goes on from there"
    assert out.splitlines()[-1] == said
    assert app.started == [0, 1]
    assert not any(app.alive(pid) for pid in hanging(app))
    assert not list(app.folder.glob("outputs/*/*/record.json"))
    app.behave({})
    assert app.run("-m", "seed=0-3").stdout.startswith("0 finished, 2 resumed, 2 new\n")


@BOTH_STARTS
def test_a_killed_sweep_leaves_nothing_behind(app, preload):
    app.behave({0: "hang", 1: "hang"})
    sweep = app.start("-m", "seed=0-1", "hydra.launcher.n_jobs=2", preload=preload)
    app.wait_until(lambda: len(hanging(app)) == 4)
    sweep.kill()
    sweep.communicate()
    app.wait_until(lambda: not any(app.alive(pid) for pid in hanging(app)))

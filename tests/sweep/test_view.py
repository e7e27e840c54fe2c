"""A person sees what every job does and when the sweep will end."""

import json
import signal

import pytest
from rich.console import Console

from simbal.files.console import clock
from simbal.sweep import pool
from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
from simbal.sweep.pool import Pool
from simbal.sweep.view import Tally, View, draw, seconds_left
from tests.run_folders import changed_spec


@pytest.fixture
def attempts(base_spec, tmp_path):
    """Six: done in 100 s, failed, running with 30 s left, running without a word, two queued."""
    states = ("done", "failed", "running", "running", "queued", "queued")
    made = []
    for seed, state in enumerate(states):
        spec = changed_spec(base_spec, {"output_dir": str(tmp_path), "seed": seed})
        attempt = Attempt(Job([f"seed={seed}"], spec), f"seed={seed}", state)
        attempt.folder.path.mkdir(parents=True)
        made.append(attempt)
    made[0].started, made[0].ended = 1.0, 101.0
    made[1].error = "killed by signal 9"
    said = {
        "phase": "train",
        "step": 70,
        "max_steps": 100,
        "loss": 4.5,
        "tokens_per_second": 8123.4,
        "seconds_left": 30.0,
    }
    (made[2].folder.path / "progress.json").write_text(json.dumps(said))
    return made


def text_of(table, width=100):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_live_view_shows_state_step_loss_speed_and_time_left_of_every_job(attempts):
    text = text_of(draw(Tally(attempts), slots=2, height=40))
    (done, failed, running, silent, *queued) = [line for line in text.splitlines() if "seed=" in line]
    assert "done" in done
    assert "1:40" in done
    assert "failed: killed by signal 9" in failed
    assert all(word in running for word in ("train", "70/100", "4.500", "8,123", "0:30"))
    assert "running" in silent
    assert all("queued" in line for line in queued)
    assert "2 running, 2 queued, 1 done, 1 failed; about" in text


def test_a_finished_row_keeps_its_step_and_its_loss_and_has_no_time_left(attempts):
    said = {"phase": "validate", "step": 100, "max_steps": 100, "loss": 3.25, "seconds_left": 7.0}
    (attempts[0].folder.path / "progress.json").write_text(json.dumps(said))
    (done,) = [line for line in text_of(draw(Tally(attempts), slots=2, height=40)).splitlines() if "seed=0" in line]
    assert done.split() == ["seed=0", "done", "100/100", "3.250", "1:40"]


def test_what_is_kept_is_said_when_a_sweep_is_stopped(attempts, capsys):
    View(attempts, 2, Console(width=300)).interrupted()
    assert capsys.readouterr().out.startswith("stopped: 1 done, 2 stopped (about step 70), 2 not begun; nothing")


def test_what_does_not_fit_is_counted_and_the_most_urgent_stays(attempts):
    text = text_of(draw(Tally(attempts), slots=2, height=9))
    assert "seed=2" in text
    assert "seed=3" in text
    assert "seed=1" in text
    assert "seed=0" not in text
    assert "and 3 more" in text


def test_the_time_left_counts_running_and_queued_jobs_over_the_slots(attempts):
    running, silent = attempts[2], attempts[3]
    progress = {id(running): {"seconds_left": 30.0}, id(silent): {}}
    # lengths known: 100 and 30, so 65 for each that has said nothing and for each in the queue
    assert seconds_left(Tally(attempts), progress, slots=2) == (30 + 65 + 2 * 65) / 2
    assert seconds_left(Tally(attempts), progress, slots=100) == 65


def test_a_run_that_was_done_elsewhere_tells_nothing_of_the_time_left(attempts):
    elsewhere = attempts[4]
    elsewhere.state, elsewhere.ended = "done", 7.0
    progress = {id(attempt): {} for attempt in attempts[2:4]}
    # two running that have not begun to count, one queued
    assert seconds_left(Tally(attempts), progress, slots=1) == 3 * 100


def test_nothing_is_known_of_the_time_left_before_a_job_says_something(attempts):
    assert seconds_left(Tally(attempts[3:]), {id(attempts[3]): {}}, slots=2) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"phase": "validate"}'])
def test_a_half_written_progress_file_is_no_error(attempts, text):
    (attempts[3].folder.path / "progress.json").write_text(text)
    assert "seed=3" in text_of(draw(Tally(attempts), slots=2, height=40))


def test_without_a_terminal_there_is_one_line_per_change(attempts):
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture, View(attempts, 2, console) as view:
        view.changed(attempts[0])
        view.refresh()
        view.changed(attempts[1])
    assert capture.get().splitlines() == ["[1/6] done    seed=0 in 1:40", "[2/6] failed  seed=1: killed by signal 9"]


class OnCluster:
    """Starts a job that looks at each poll as the next of `looks` says, and then has ended, without a result."""

    def __init__(self, *looks):
        self.looks = looks

    def start(self, task, environment):
        self.left = [*self.looks]
        return self

    def begun(self):
        return self.left[0] == "runs"

    def poll(self):
        del self.left[0]
        return None if self.left else self.wait()

    def wait(self):
        return 1

    def signal(self, number):
        pass


def test_a_job_that_a_cluster_lets_wait_is_queued_and_its_time_is_that_since_it_has_begun(attempts, monkeypatch):
    slept = []
    monkeypatch.setattr(pool.time, "sleep", slept.append)
    monkeypatch.setattr(pool.time, "monotonic", lambda: 60.0 * len(slept))
    console = Console(width=100, force_terminal=False)
    cluster = OnCluster("waits", "waits", "runs", "runs", "waits", "runs")
    with console.capture() as capture:
        Pool([{}], cluster, View(attempts[5:], 1, console)).run(attempts[5:])
    reason = "ended with exit code 1 and no result"
    changes = ["running seed=5", "queued  seed=5", "running seed=5", f"failed  seed=5: {reason}"]
    assert capture.get().splitlines() == [f"[1/1] {change}" for change in changes]
    assert attempts[5].seconds == 60


def test_a_job_that_has_not_begun_when_its_sweep_is_stopped_is_none_that_was_stopped(attempts, monkeypatch, capsys):
    monkeypatch.setattr(pool.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Pool([{}], OnCluster("waits", "waits"), View(attempts[5:], 1, Console(width=300))).run(attempts[5:])
    assert capsys.readouterr().out.startswith("stopped: 0 done, 0 stopped, 1 not begun; nothing")


def test_on_a_terminal_the_last_state_stays_on_the_screen(attempts):
    console = Console(width=100, height=40, force_terminal=True)
    with console.capture() as capture, View(attempts, 2, console) as view:
        attempts[2].state = "done"
        view.changed(attempts[2])
    assert "1 running, 2 queued, 2 done, 1 failed" in capture.get()


def test_times_are_minutes_and_seconds_then_hours():
    assert (clock(5), clock(125.4), clock(3725)) == ("0:05", "2:05", "1:02:05")

"""A person sees what every job does and when the sweep will end."""

import json

import pytest
from rich.console import Console

from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
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


def test_without_a_terminal_there_is_one_line_per_change(attempts):
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture, View(attempts, 2, console) as view:
        view.changed(attempts[0])
        view.refresh()
        view.changed(attempts[1])
    assert capture.get().splitlines() == ["[1/6] done    seed=0 in 1:40", "[2/6] failed  seed=1: killed by signal 9"]

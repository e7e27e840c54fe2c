"""The live view shows the state of every job and the remaining time; index.html is updated."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from simbal.processes import LocalProcess
from simbal.sweeping.composer import Job
from simbal.sweeping.plan import Attempt
from simbal.sweeping.pool import Pool
from simbal.sweeping.view import View, draw, seconds_left
from tests.run_folders import changed_spec

REFRESH = '<meta http-equiv="refresh" content="30">'
PROGRESS = {
    "phase": "train", "step": 70, "max_steps": 100, "loss": 4.5, "tokens_per_second": 8123.4, "seconds_left": 30.0,
}  # fmt: skip


@pytest.fixture
def attempts(base_spec, tmp_path):
    """Six runs: done in 100 s, failed, running with 30 s left, running without progress, and two queued."""
    attempts = []
    for seed, state in enumerate(("done", "failed", "running", "running", "queued", "queued")):
        spec = changed_spec(base_spec, {"output_dir": str(tmp_path), "seed": seed})
        attempts.append(Attempt(Job([f"seed={seed}"], spec), f"seed={seed}", state))
        attempts[-1].folder.path.mkdir(parents=True)
    attempts[0].started, attempts[0].ended = 1.0, 101.0
    attempts[1].error = "killed by signal 9"
    (attempts[2].folder.path / "progress.json").write_text(json.dumps(PROGRESS))
    return attempts


def text_of(table):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_live_table_shows_state_step_loss_speed_and_time_left(attempts):
    text = text_of(draw(attempts, slots=2, height=24))
    done, failed, running, silent, *queued = [line for line in text.splitlines() if "seed=" in line]
    assert "done" in done
    assert "1:40" in done
    assert "failed: killed by signal 9" in failed
    assert all(word in running for word in ("train", "70/100", "4.500", "8,123", "0:30"))
    assert "running" in silent
    assert all("queued" in line for line in queued)
    assert "2 running, 2 queued, 1 done, 1 failed; about" in text


def test_a_short_terminal_shows_the_most_urgent_runs(attempts):
    text = text_of(draw(attempts, slots=2, height=9))
    assert [f"seed={seed}" in text for seed in range(6)] == [False, True, True, True, False, False]
    assert "and 3 more" in text


def test_the_time_left_counts_running_and_queued_jobs(attempts):
    progress = {id(attempts[2]): {"seconds_left": 30.0}, id(attempts[3]): {}}
    # known lengths are 100 and 30, so 65 for the running job without progress and for each queued job
    assert seconds_left(attempts, progress, slots=2) == (30 + 65 + 2 * 65) / 2
    assert seconds_left(attempts, progress, slots=100) == 65


def test_without_a_terminal_each_change_is_one_line(attempts):
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture, View(attempts, 2, console) as view:
        view.print_change(attempts[0])
        view.refresh()
        view.print_change(attempts[1])
    assert capture.get().splitlines() == ["[1/6] done    seed=0 in 1:40", "[2/6] failed  seed=1: killed by signal 9"]


class ProgramStarter:
    """Start a Python program for each run, by hash."""

    def __init__(self, programs):
        self.programs = programs

    def start(self, task, environment):
        command = [sys.executable, "-c", self.programs[task["hash"]]]
        return LocalProcess(subprocess.Popen(command, start_new_session=True))


def test_the_page_is_written_when_a_job_ends_and_refreshes_until_the_sweep_is_stopped(small_spec):
    specs = [small_spec(f"seed={seed}") for seed in range(2)]
    attempts = [Attempt(Job([], spec), f"seed={seed}") for seed, spec in enumerate(specs)]
    file, pages = specs[0].path.parent / "index.html", []

    class StopAfterPage(View):
        def refresh(self):
            if file.exists():
                pages.append(file.read_text())
                raise KeyboardInterrupt

    programs = {specs[0].hash: "raise SystemExit(1)", specs[1].hash: "import time; time.sleep(300)"}
    view = StopAfterPage(attempts, 2, Console(file=io.StringIO()))
    with pytest.raises(KeyboardInterrupt):
        Pool([{}, {}], ProgramStarter(programs), view).run(attempts)
    (page,) = pages
    assert REFRESH in page
    assert "ended with exit code 1 and no result" in page
    assert REFRESH not in file.read_text()

"""A sweep of very many jobs: what a poll costs does not grow with the jobs that have ended or wait."""

from dataclasses import replace

import pytest
from rich.console import Console

from simbal.sweep import pool
from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
from simbal.sweep.pool import CLAIMS, Pool
from simbal.sweep.view import FRAME_LINES, Tally, View, draw


@pytest.fixture
def attempts_in(base_spec, tmp_path):
    """Makes attempts in these states, in their order."""

    def make(*states):
        specs = [replace(base_spec, folder=tmp_path / str(number)) for number in range(len(states))]
        return [Attempt(Job([], spec), str(spec.path), state) for spec, state in zip(specs, states, strict=True)]

    return make


def test_the_live_view_reads_no_more_folders_than_it_has_lines_and_running_jobs(attempts_in, monkeypatch):
    attempts = attempts_in(*["done"] * 500, *["running"] * 3, *["queued"] * 5)
    read = []
    monkeypatch.setattr(Attempt, "progress", lambda attempt: read.append(attempt.state) or {})
    grid = draw(Tally(attempts), slots=3, height=12 + FRAME_LINES)
    assert read == ["running"] * 3 + ["done"] * 4
    assert grid.row_count == 12 + 1
    assert grid.caption.startswith("3 running, 5 queued, 500 done")


def test_a_tally_follows_every_change(attempts_in):
    attempts = attempts_in("queued", "queued", "elsewhere")
    tally = Tally(attempts)
    for attempt, state in ((attempts[0], "running"), (attempts[2], "done"), (attempts[0], "done")):
        attempt.state, attempt.started, attempt.ended = state, (attempt is attempts[0]) * 1.0, 8.0
        tally.note(attempt)
    counted = {state: count for state, count in tally.counts.items() if count}
    assert counted == {"queued": 1, "done": 2}
    assert (tally.lengths, tally.seconds) == (1, 7.0)  # the other was done by another process


def test_runs_that_other_processes_hold_are_tried_in_turn_a_few_at_a_poll(attempts_in, monkeypatch):
    attempts = attempts_in(*["queued"] * (CLAIMS + 4))
    tried, polls = [], iter(range(3))
    monkeypatch.setattr(Attempt, "claim", lambda attempt: tried.append(attempt) or ("elsewhere", "busy"))

    def sleep(seconds):
        if next(polls, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(pool.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        Pool([{}], None, View(attempts, 1, Console(quiet=True))).run(attempts)
    assert tried == [*attempts, *attempts, *attempts, *attempts][: 4 * CLAIMS]

"""A sweep of very many jobs: what a poll costs does not grow with the jobs that have ended or wait."""

from dataclasses import replace

import pytest

from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
from simbal.sweep.view import FRAME_LINES, Tally, draw


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

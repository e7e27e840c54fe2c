"""What the watch over running trials reads of their curves, whoever has written the file."""

import json

import optuna
import pytest

from simbal.runs.folder import RunFolder
from simbal.sweep.composer import Job
from simbal.sweep.search.results import curve
from simbal.sweep.search.search import Candidate


def write(folder, *lines):
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))


def row(**values):
    return json.dumps({"tokens": 1} | values).encode() + b"\n"


def test_a_curve_has_the_finite_values_of_a_metric_by_step(tmp_path):
    rows = [
        row(step=0, a=1.0),
        row(step=5, a=2.0, b=1),
        row(step=10, b=3.0),
        row(step=15, a=float("inf")),
        row(step=20, a=4),
    ]
    write(tmp_path, *rows)
    assert curve(tmp_path, "a") == {5: 2.0, 20: 4.0}


def test_a_run_that_has_written_nothing_has_no_curve(tmp_path):
    assert curve(tmp_path, "a") == {}


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 10, "a": 1', b"\xff\xfe\n", b"[]\n", b"[" * 100_000 + b"}\n", b"1" * 10_000 + b"}\n",
        b"null\n", b"\0" * 99,
        row(a=1.0), row(step="10", a=1.0), row(step=True, a=1.0), row(step=10, a="1"), row(step=10, a=[1]),
        row(step=10, a=True), row(step=10, a=10**400), row(step=10**30, a=1.0), row(step=-10, a=1.0),
        row(step=10, a=None),
    ],
)  # fmt: skip
def test_a_line_that_says_nothing_of_the_metric_is_left_out(tmp_path, line):
    write(tmp_path, row(step=5, a=2.0), line)
    assert curve(tmp_path, "a") == {5: 2.0}


def test_a_candidate_reports_every_step_once(small_spec):
    spec = small_spec()
    RunFolder(spec.path).write_spec(spec)
    trial = optuna.create_study().ask()
    candidate = Candidate(trial, [Job([], spec)])
    candidate.look("a")
    write(spec.path, row(step=5, a=2.0), b'{"step": 10')
    candidate.look("a")
    write(spec.path, row(step=5, a=2.0), row(step=10, a=3.0))
    candidate.look("a")
    candidate.look("a")
    assert trial.study.trials[0].intermediate_values == {5: 2.0, 10: 3.0}
    assert candidate.reported == {5, 10}

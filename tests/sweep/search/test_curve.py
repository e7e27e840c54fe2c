"""What the watch over running trials reads of their curves."""

import json

import optuna

from simbal.runs.folder import RunFolder
from simbal.sweep.composer import Job
from simbal.sweep.search.search import Candidate


def row(**values):
    return json.dumps({"tokens": 1} | values) + "\n"


def test_a_candidate_reports_every_finite_value_once(small_spec):
    spec = small_spec()
    RunFolder(spec.path).write_spec(spec)
    trial = optuna.create_study().ask()
    candidate = Candidate(trial, [Job([], spec)])
    candidate.look("a")
    curve = spec.path / "metrics.jsonl"
    first = row(step=0, a=1.0) + row(step=5, a=2.0, b=1) + row(step=10, b=3.0) + row(step=15, a=float("inf"))
    curve.write_text(first + '{"step": 20')  # a line half written
    candidate.look("a")
    assert trial.study.trials[0].intermediate_values == {5: 2.0}
    curve.write_text(first + row(step=20, a=3))
    candidate.look("a")
    candidate.look("a")
    assert trial.study.trials[0].intermediate_values == {5: 2.0, 20: 3.0}

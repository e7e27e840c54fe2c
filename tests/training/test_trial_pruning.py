"""A run that its sweep gives up on stops at once, says so in its record, and can be finished later to the same bits."""

import json

import pytest

from simbal.runs.folder import PRUNE_FILE, RunFolder
from simbal.training.run import train
from simbal.training.telemetry import Telemetry
from tests.training.run_files import assert_same_run, rows


@pytest.fixture
def pruned_after_validation(monkeypatch):
    """The sweep writes prune.json while the validation of step 6 is being written."""
    log_validation = Telemetry.log_validation

    def log_and_prune(telemetry, trainer, step):
        log_validation(telemetry, trainer, step)
        if step == 6:
            (telemetry.folder / PRUNE_FILE).write_text(json.dumps({"reason": "pruned by trial 3: worse than others"}))

    monkeypatch.setattr(Telemetry, "log_validation", log_and_prune)
    return monkeypatch


def test_a_pruned_run_stops_before_its_next_batch_and_can_be_finished(small_spec, finished, pruned_after_validation):
    spec = small_spec()
    train(spec)
    record = RunFolder(spec.path).read_record()
    assert record["status"] == "pruned"
    assert record["error"] == "pruned by trial 3: worse than others; stopped at step 6"
    assert record["config_hash"] == spec.hash
    assert rows(spec)[-1]["step"] == 6
    assert not (spec.path / PRUNE_FILE).exists()
    pruned_after_validation.undo()
    train(spec)
    assert RunFolder(spec.path).is_finished(spec)
    assert_same_run(spec, finished())


def test_a_word_from_before_the_run_is_stale(small_spec):
    spec = small_spec()
    spec.path.mkdir(parents=True)
    (spec.path / PRUNE_FILE).write_text(json.dumps({"reason": "pruned by an earlier sweep"}))
    train(spec)
    assert RunFolder(spec.path).is_finished(spec)
    assert not (spec.path / PRUNE_FILE).exists()

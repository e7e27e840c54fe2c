"""The hash tells runs apart, the folder says which is which, and what earlier versions wrote is still read."""

import hashlib
import json
from pathlib import Path

import pytest

from simbal.analysis.evaluate import evaluate
from simbal.config.check import checked
from simbal.config.schema import as_dict, can_change_result, every_key
from simbal.config.values import Shared
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec, config_hash, result_keys
from simbal.training.run import train
from tests.config.any_form import value_at, with_key, without
from tests.run_folders import changed

HERE = Path("here")
LATER = {name: key.before for name, _, key in every_key() if key.before is not ...}
ALWAYS = [name for name in dict.fromkeys(name for name, _, _ in every_key()) if name not in LATER]
NO_MATTER = {
    "name", "baseline", "equivalence_margin", "columns", "dry_run", "until", "max_seeds", "retry_failed", "output_dir",
    "store",
    "data.cache_dir", "data.tokenizer_path",
    "data.threads", "trainer.force_precision", "trainer.ckpt_every", "trainer.ckpt_seconds", "trainer.progress_bar",
    "logger", "logger.kind", "logger.tracking_uri", "logger.experiment", "logger.project", "logger.offline",
}  # fmt: skip
PPL = {
    "ppl": {"_target_": "simbal.analysis.quality.quality", "tokens": None, "batch_size": 16, "resamples": 2, "seed": 0}
}


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in every_key()))
def test_the_hash_moves_exactly_for_the_keys_that_can_change_the_result(base_spec, name):
    plain = with_key(base_spec.written, name)
    moved = config_hash(changed(plain, {name: "another"})) != config_hash(plain)
    assert moved == (name not in NO_MATTER)
    assert can_change_result(name) == moved


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("name=other", True), ("logger=tensorboard", True), ("baseline=none", True), ("seed=1", False),
        ("balancing=lbl", False), ("optim.lr=0.02", False), ("trainer.max_steps=13", False), ("data.seed=1", False),
    ],
)  # fmt: skip
def test_an_override_moves_the_hash_exactly_when_the_result_can(small_spec, override, same):
    assert (small_spec(override).hash == small_spec().hash) == same


def test_the_hash_is_that_of_all_keys_that_can_change_the_result_as_one_json_object(base_spec):
    as_read = {key: Shared(value) if isinstance(value, dict) else value for key, value in base_spec.written.items()}
    text = json.dumps(result_keys(base_spec.written), sort_keys=True)
    assert {config_hash(base_spec.written), config_hash(as_read)} == {hashlib.sha256(text.encode()).hexdigest()}


def test_folder_names_are_short_plain_and_readable(small_spec):
    name = small_spec("balancing=lbl", "seed=3").path.name
    assert name.startswith("lbl-tiny-seed3-")
    assert len(name) == len("lbl-tiny-seed3-") + 8


@pytest.mark.parametrize("name", LATER)
def test_a_run_from_before_a_key_is_read_with_what_it_was_then_and_keeps_its_hash(base_spec, name):
    whole = with_key(base_spec.written, name)
    written = without(whole, name)
    spec = RunSpec.saved(written, base_spec.choices, HERE)
    assert value_at(as_dict(spec.config), name) == LATER[name]
    assert spec.hash == config_hash(written)
    assert (spec.hash == config_hash(whole)) == (name in NO_MATTER)
    assert spec.written == written
    assert value_at(spec.complete, name) == LATER[name]
    assert without(spec.complete, name) == written


def test_a_run_from_before_all_of_them_trains_and_is_evaluated(small_spec):
    spec = RunSpec.saved(without(small_spec().written, *LATER), small_spec().choices, small_spec().path)
    train(spec)
    folder = RunFolder(spec.path)
    assert folder.read_spec().written == spec.written
    assert folder.read_record()["config_hash"] == spec.hash != small_spec().hash
    evaluate(PPL, str(spec.path), True, "cpu", "unused")
    metrics = json.loads((spec.path / "analysis" / "ppl.json").read_text())["metrics"]
    assert metrics["ppl"] == pytest.approx(folder.read_record()["metrics"]["val/ppl"], rel=1e-6)


def test_keys_of_later_versions_are_passed_over_in_a_folder_and_refused_on_the_command_line(base_spec):
    later = {"newest": 1, "model.newest": [1], "data.newest": {"a": None}, "trainer.newest": "x", "logger.newest": None}
    written = changed(base_spec.written, later)
    spec = RunSpec.saved(written, base_spec.choices, HERE)
    assert as_dict(spec.config) == base_spec.written
    assert spec.written == written
    assert spec.hash == config_hash(written) != base_spec.hash
    with pytest.raises(UserError, match="there is no key newest"):
        checked(written)


@pytest.mark.parametrize("name", [name for name in ALWAYS if name != "balancing"])
def test_a_folder_that_lacks_a_key_that_there_always_was_is_refused(base_spec, name):
    with pytest.raises(UserError, match=f"^{name}(.kind|.source)?(=None)? is (missing|not one of)"):
        RunSpec.saved(without(with_key(base_spec.written, name), name), base_spec.choices, HERE)

"""The hash tells runs apart, the folder says which is which, and a folder with other keys is refused."""

import hashlib
import json
from pathlib import Path

import pytest

from simbal.config.schema import can_change_result, every_key
from simbal.errors import ConfigError
from simbal.runs.spec import RunSpec, config_hash, result_keys
from tests.config.any_form import with_key, without
from tests.run_folders import changed

HERE = Path("here")
KEYS = [*every_key()]
NO_MATTER = {
    "name", "baseline", "equivalence_margin", "columns", "dry_run", "until", "max_seeds", "retry_failed", "output_dir",
    "data.cache_dir", "data.tokenizer_path",
    "data.threads", "trainer.force_precision", "trainer.ckpt_every", "trainer.ckpt_seconds", "trainer.progress_bar",
    "logger", "logger.kind", "logger.tracking_uri", "logger.experiment", "logger.project", "logger.entity",
    "logger.offline",
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
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
    text = json.dumps(result_keys(base_spec.written), sort_keys=True)
    assert config_hash(base_spec.written) == hashlib.sha256(text.encode()).hexdigest()


def test_folder_names_are_short_plain_and_readable(small_spec):
    name = small_spec("balancing=lbl", "seed=3").path.name
    assert name.startswith("lbl-tiny-seed3-")
    assert len(name) == len("lbl-tiny-seed3-") + 8


@pytest.mark.parametrize("name", [name for name in KEYS if name != "balancing"])
def test_a_folder_that_lacks_a_key_is_refused(base_spec, name):
    with pytest.raises(ConfigError, match=f"^{name}(.kind|.source)? is missing"):
        RunSpec.saved(without(with_key(base_spec.written, name), name), base_spec.choices, HERE)


@pytest.mark.parametrize("name", ["newest", "model.newest", "data.newest", "logger.newest"])
def test_a_folder_with_an_unknown_key_is_refused(base_spec, name):
    with pytest.raises(ConfigError, match=f"there is no key {name}"):
        RunSpec.saved(changed(base_spec.written, {name: 1}), base_spec.choices, HERE)

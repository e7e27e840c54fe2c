"""The hash identifies a run, and its folder is named readably."""

import pytest

from simbal.config.schema import can_change_result, every_key
from simbal.runs.spec import config_hash
from tests.config.any_form import with_key
from tests.run_folders import changed

UNHASHED = {
    "name", "baseline", "equivalence_margin", "columns", "dry_run", "until", "max_seeds", "retry_failed", "output_dir",
    "data.cache_dir", "data.tokenizer_path",
    "data.threads", "trainer.force_precision", "trainer.ckpt_every", "trainer.ckpt_seconds", "trainer.progress_bar",
    "logger", "logger.kind", "logger.tracking_uri", "logger.experiment", "logger.project", "logger.entity",
    "logger.offline",
}  # fmt: skip


def test_the_hash_changes_exactly_for_the_keys_that_can_change_the_result(base_spec):
    for name in every_key():
        plain = with_key(base_spec.written, name)
        moved = config_hash(changed(plain, {name: "another"})) != config_hash(plain)
        assert moved == can_change_result(name) == (name not in UNHASHED), name


@pytest.mark.parametrize(
    ("override", "same"),
    [("name=other", True), ("logger=tensorboard", True), ("seed=1", False), ("balancing=lbl", False)],
)
def test_an_override_changes_the_hash_if_it_can_change_the_result(small_spec, override, same):
    assert (small_spec(override).hash == small_spec().hash) == same


def test_folder_names_are_short_and_readable(small_spec):
    name = small_spec("balancing=lbl", "seed=3").path.name
    assert name.startswith("lbl-tiny-seed3-")
    assert len(name) == len("lbl-tiny-seed3-") + 8

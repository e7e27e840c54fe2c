"""The hash identifies a run, and its folder is named readably."""

import pytest

from simbal.config.schema import can_change_result, every_key
from simbal.report.arms import with_folders
from simbal.runs.folder import RunFolder
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


def test_a_folder_is_named_by_arm_seed_and_hash_and_found_by_seed_and_hash(small_spec):
    spec = small_spec("balancing=lbl", "seed=3")
    assert (spec.path.name, spec.arm) == (f"lbl-seed3-{spec.hash[:8]}", "lbl")
    renamed = spec.path.with_name(f"lbl-tiny-{spec.suffix}")
    renamed.mkdir(parents=True)
    again = small_spec("balancing=lbl", "seed=3")
    assert (again.path, again.arm) == (renamed, "lbl-tiny")


def test_new_folders_are_named_by_the_keys_that_differ_in_their_sweep(small_spec):
    def names(*specs):
        return [spec.arm for spec in with_folders(specs)]

    plain, router = small_spec(), small_spec("balancing=remoe")
    coefs = [small_spec(f"balancing.simbal.coef={coef}") for coef in (0.5, 0.25)]
    assert names(plain, router) == ["simbal", "remoe"]
    assert names(*coefs, router) == ["simbal-coef_0.5", "simbal-coef_0.25", "remoe"]
    RunFolder(plain.path).write_spec(plain)
    assert names(coefs[0], plain) == ["simbal-coef_0.5", "simbal"]  # an existing folder keeps its name
    assert names(small_spec("name=other", "balancing.simbal.coef=0.5")) == ["simbal"]

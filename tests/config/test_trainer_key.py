"""A new key of the trainer is three lines in three files, which are pasted here into a copy of the package."""

import importlib
import shutil
import sys

import pytest

from tests.conftest import CONF

REPOSITORY = CONF.parent
PASTED = {  # by file, the line and the one that it stands before
    "conf/trainer/default.yaml": ("val_batches: 3  # micro-batches validated; null: all\n", "log_every: 10"),
    "src/simbal/config/schema.py": (
        '    val_batches: Annotated[int | None, Key("micro-batches validated; null: all", least=1)]\n',
        "    log_every: Annotated[",
    ),
    "src/simbal/training/run.py": ("        limit_val_batches=keys.val_batches,\n", "        num_sanity_val_steps=0,"),
}


def of_the_package():
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "simbal"}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A function that imports a module of the copy, in this process: nothing else of it differs from ours."""
    for folder in ("conf", "src/simbal"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, (line, next_line) in PASTED.items():
        text = (tmp_path / file).read_text()
        assert text.count(next_line) == 1
        (tmp_path / file).write_text(text.replace(next_line, line + next_line))
    with monkeypatch.context() as patch:
        for name in of_the_package():
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(tmp_path / "src")
        yield lambda name: importlib.import_module(f"simbal.{name}")
        for name in of_the_package():
            del sys.modules[name]


def test_three_lines_make_a_key_that_is_read_checked_and_used(copied, small_spec, tmp_path):
    written = small_spec().written
    check, spec = copied("config.check"), copied("runs.spec")
    values = copied("config.catalogue").Catalogue([tmp_path / "conf"]).option_keys("trainer", "default")
    default = {"trainer": written["trainer"] | {"val_batches": values["trainer.val_batches"]}}
    run = spec.RunSpec(check.checked(written | default), {"balancing": "simbal"}, written | default)
    trainer = copied("training.run").build_trainer(run, tmp_path, copied("training.telemetry"), [], "cpu", "32-true")
    assert trainer.limit_val_batches == 3
    assert spec.config_hash(written | default) != spec.config_hash(written)
    refused = {"trainer": written["trainer"] | {"val_batches": 0}}
    with pytest.raises(copied("errors").UserError, match="^trainer.val_batches=0 must be null or at least 1$"):
        check.checked(written | refused)

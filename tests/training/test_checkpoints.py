"""Checkpoints: which ones a run keeps, and from which one it resumes."""

import random
import shutil
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simbal.config.schema import TrainerConfig
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training import checkpoint
from simbal.training.callbacks import MetricsLogger
from simbal.training.checkpoint import DamagedCheckpointError
from simbal.training.run import train
from tests.training.run_files import assert_same_run, checkpoints, train_until


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    return tmp_path_factory.mktemp("killed")


@pytest.fixture
def killed(small_spec, finished, killed_once, monkeypatch):
    """An uninterrupted run, and the same run killed in step 11 with checkpoints of steps 4 and 8."""
    key = "trainer.micro_batch=4"
    reference, original, copy = finished(key), small_spec(key, output_dir=killed_once), small_spec(key)
    if not original.path.exists():
        train_until(monkeypatch, original, 11)
    shutil.copytree(original.path, copy.path)
    return reference, copy


def flip_a_bit(path, seed):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + seed] ^= 1  # in a tensor: zip files have bytes without meaning
    path.write_bytes(content)


def truncate(path, seed):
    content = path.read_bytes()
    path.write_bytes(content[: random.Random(seed).randrange(len(content))])


def test_the_two_newest_checkpoints_are_kept_until_the_run_ends(small_spec, monkeypatch):
    spec = small_spec("trainer.ckpt_every=2", "trainer.max_steps=8")
    train_until(monkeypatch, spec, 7)
    assert checkpoints(spec) == ["step-00000004.ckpt", "step-00000006.ckpt"]
    train(spec)
    assert checkpoints(spec) == ["final.ckpt"]


def test_a_checkpoint_is_saved_when_the_last_one_is_too_old(small_spec, monkeypatch):
    spec = small_spec("trainer.ckpt_every=1000", "trainer.ckpt_seconds=30")
    clock = iter(range(0, 10_000, 8))  # seconds: at the start, after each step and after each save
    clocks = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(checkpoint, "time", clocks)
    train_until(monkeypatch, spec, 11)
    assert checkpoints(spec) == ["step-00000004.ckpt", "step-00000008.ckpt"]


@pytest.mark.parametrize(("damage", "count"), [(truncate, 1), (flip_a_bit, 2)])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_survives_another_kill(killed, damage, count, monkeypatch):
    reference, spec = killed
    newest_first = checkpoint.periodic_checkpoints(spec.path / "checkpoints")
    for seed, path in enumerate(newest_first[:count]):
        damage(path, seed)
    train_until(monkeypatch, spec, 10)
    train(spec)
    assert_same_run(reference, spec)
    warnings = RunFolder(spec.path).read_record()["warnings"]
    assert len(warnings) == count
    assert "step-00000008.ckpt was damaged" in warnings[-1]
    assert RunFolder(reference.path).read_record()["warnings"] == []
    assert checkpoints(spec) == ["final.ckpt"]


def test_damaged_curves_are_written_again(killed):
    reference, spec = killed
    file = spec.path / "metrics.jsonl"
    file.write_text(file.read_text().replace("1", "2", 1))  # in the row of step 0, before every checkpoint
    train(spec)
    assert_same_run(reference, spec)
    assert len(RunFolder(spec.path).read_record()["warnings"]) == 2


def test_a_checkpoint_of_another_config_is_refused(killed, small_spec):
    _, spec = killed
    other = small_spec("seed=5", output_dir=spec.config.output_dir)
    theirs = spec.path / "checkpoints" / "step-00000008.ckpt"
    ours = other.path / "checkpoints" / theirs.name
    ours.parent.mkdir(parents=True)
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(UserError, match="belongs to another config"):
        train(other)
    assert ours.exists()


def test_temporary_files_of_a_killed_process_are_removed(killed):
    _, spec = killed
    for path in (spec.path / "checkpoints" / ".step-00000004.ckpt.123.part", spec.path / ".record.json.7.part"):
        path.write_text("half")
    train(spec)
    assert not [*spec.path.rglob(".*.part")]


def save(step, path, **parts):
    content = {"state_dict": {}, "global_step": step, "callbacks": {"MetricsLogger": {"bytes": 0, "sha256": ""}}}
    checkpoint.AtomicCheckpointIO("hash").save_checkpoint(content | parts, path)
    return path


def newest(folder):
    return checkpoint.find_newest(folder, "hash", lambda curves: None)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    """The bytes of a checkpoint of step 4, and its tensors."""
    state = {"w": torch.arange(64.0), "n": torch.arange(5)}
    path = save(4, tmp_path_factory.mktemp("small") / "step-00000004.ckpt", state_dict=state)
    return path.read_bytes(), state


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the folder may be overwritten
@given(data=st.data())
def test_no_flipped_bit_changes_what_is_loaded(small_checkpoint, tmp_path, data):
    content, state = small_checkpoint
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "step-00000004.ckpt"
    path.write_bytes(changed)
    start = newest(tmp_path)
    if start.path is None:
        assert (tmp_path / "step-00000004.ckpt.damaged").exists()
    else:
        loaded = torch.load(start.path, weights_only=True)["state_dict"]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_disk_error_is_not_reported_as_damage(small_checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "step-00000004.ckpt"
    path.write_bytes(small_checkpoint[0])

    def broken_disk(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zipfile, "ZipFile", broken_disk)
    with pytest.raises(OSError, match="Input/output error"):
        newest(tmp_path)
    assert path.exists()


@pytest.fixture
def metrics_logger(tmp_path):
    return MetricsLogger(tmp_path, TrainerConfig.model_construct(), 1, None)


def test_a_checkpoint_without_a_valid_digest_of_its_rows_is_skipped(tmp_path, metrics_logger):
    assert metrics_logger.find_damage({})
    assert metrics_logger.find_damage({"bytes": 3, "sha256": ""})
    save(4, tmp_path / "step-00000004.ckpt")
    save(8, tmp_path / "step-00000008.ckpt", callbacks=5)
    assert newest(tmp_path).step == 4


def test_a_checkpoint_whose_name_has_another_step_is_damaged(tmp_path):
    save(4, tmp_path / "step-00000004.ckpt")
    save(3, tmp_path / "step-99999999.ckpt")
    start = newest(tmp_path)
    assert (start.path, start.step) == (tmp_path / "step-00000004.ckpt", 4)
    assert (tmp_path / "step-99999999.ckpt.damaged").exists()
    assert len(checkpoint.damage_warnings(tmp_path)) == 1
    with pytest.raises(DamagedCheckpointError, match="it is of step 4"):
        checkpoint.read(save(4, tmp_path / "weights-00000008.ckpt"))


def test_files_with_other_names_are_not_touched(tmp_path):
    for name in ("step-new.ckpt", "step-4.ckpt", "step-.ckpt", "step-99999999999999999999.ckpt"):
        save(4, tmp_path / name)
    assert newest(tmp_path).path is None
    checkpoint.remove_periodic(tmp_path)
    assert len([*tmp_path.glob("*.ckpt")]) == 4

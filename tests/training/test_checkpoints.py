"""Which checkpoints a run keeps, and which one it goes on from."""

import random
import shutil
import zipfile
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training import checkpoint
from simbal.training import checkpoint as saving
from simbal.training.checkpoint import DamagedCheckpointError
from simbal.training.run import train
from simbal.training.callbacks import MetricsLogger
from tests.training.run_files import assert_same_run
from tests.training.test_faults import KilledError, kill_at


def checkpoints(spec):
    return sorted(path.name for path in (spec.path / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def remains(tmp_path_factory):
    """What `killed` has copies of."""
    return tmp_path_factory.mktemp("remains")


@pytest.fixture
def killed(small_spec, finished, remains, tmp_path, monkeypatch):
    """A run that was killed in step 11 with checkpoints of steps 4 and 8, and the same run to its end."""
    key = "trainer.micro_batch=4"
    whole, first, broken = finished(key), small_spec(key, output_dir=remains), small_spec(key)
    if not first.path.exists():
        with monkeypatch.context() as patch:
            kill_at(patch, 11)
            with pytest.raises(KilledError):
                train(first)
    shutil.copytree(first.path, broken.path)
    return whole, broken


def flip_a_bit(path, seed):
    content = bytearray(path.read_bytes())
    draws = random.Random(seed)
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    path.write_bytes(content)


def truncate(path, seed):
    content = path.read_bytes()
    path.write_bytes(content[: random.Random(seed).randrange(len(content))])


def test_the_two_newest_stay_and_none_after_the_end(small_spec, monkeypatch):
    spec = small_spec("trainer.ckpt_every=2")
    with monkeypatch.context() as patch:
        kill_at(patch, 11)
        with pytest.raises(KilledError):
            train(spec)
    assert checkpoints(spec) == ["step-00000008.ckpt", "step-00000010.ckpt"]
    train(spec)
    assert checkpoints(spec) == ["final.ckpt"]


def test_one_is_due_by_time_too(small_spec, monkeypatch):
    spec = small_spec("trainer.ckpt_every=1000", "trainer.ckpt_seconds=30")
    clock = iter(range(0, 10_000, 8))  # seconds, at every look
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    kill_at(monkeypatch, 11)
    with pytest.raises(KilledError):
        train(spec)
    # looks: at the start, after each step, and when it is saved
    assert checkpoints(spec) == ["step-00000004.ckpt", "step-00000008.ckpt"]


def test_how_often_they_are_written_is_no_part_of_what_a_run_is(small_spec):
    assert small_spec("trainer.ckpt_every=3").hash == small_spec("trainer.ckpt_seconds=60").hash


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
@pytest.mark.parametrize("newest", [1, 2])
def test_a_damaged_one_is_passed_over_with_a_warning(killed, damage, newest):
    whole, broken = killed
    files = sorted((broken.path / "checkpoints").glob("step-*"), reverse=True)
    for seed, path in enumerate(files[:newest]):
        damage(path, seed)
    train(broken)
    assert_same_run(whole, broken)
    warnings = RunFolder(broken.path).read_record()["warnings"]
    assert len(warnings) == newest
    assert "step-00000008.ckpt was damaged" in warnings[-1]
    assert RunFolder(whole.path).read_record()["warnings"] == []
    assert checkpoints(broken) == ["final.ckpt"]


def test_the_warning_survives_another_kill(killed, monkeypatch):
    whole, broken = killed
    truncate(broken.path / "checkpoints" / "step-00000008.ckpt", 0)
    with monkeypatch.context() as patch:
        kill_at(patch, 10)
        with pytest.raises(KilledError):
            train(broken)
    train(broken)
    assert_same_run(whole, broken)
    assert RunFolder(broken.path).read_record()["warnings"]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_damaged_curves_are_written_again(killed, damage):
    whole, broken = killed
    file = broken.path / "metrics.jsonl"
    first = file.read_bytes().split(b"\n")[0] + b"\n"  # of step 0, before every checkpoint
    broken_part = broken.path / "part"
    broken_part.write_bytes(first)
    damage(broken_part, 3)
    file.write_bytes(broken_part.read_bytes() + file.read_bytes()[len(first) :])
    broken_part.unlink()
    train(broken)
    assert_same_run(whole, broken)
    assert len(RunFolder(broken.path).read_record()["warnings"]) == 2


def test_one_of_another_config_is_refused(killed, small_spec):
    _, broken = killed
    other = small_spec("seed=5", output_dir=broken.config.output_dir)
    theirs = broken.path / "checkpoints" / "step-00000008.ckpt"
    ours = other.path / "checkpoints" / theirs.name
    ours.parent.mkdir(parents=True)
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(UserError, match="belongs to another config"):
        train(other)
    assert ours.exists()


def test_what_a_killed_writer_left_is_removed(small_spec):
    spec = small_spec()
    folder = spec.path / "checkpoints"
    folder.mkdir(parents=True)
    for path in (folder / ".step-00000004.ckpt.123.part", spec.path / ".record.json.7.part"):
        path.write_text("half")
    train(spec)
    assert not [*spec.path.rglob("*.part"), *spec.path.rglob(".*.part")]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A small checkpoint, and what is in it."""
    path = tmp_path_factory.mktemp("one") / "step-00000004.ckpt"
    state = {"w": torch.arange(64.0), "n": torch.arange(5)}
    content = {"state_dict": state, "global_step": 4, "callbacks": {"MetricsLogger": {"bytes": 0, "sha256": ""}}}
    checkpoint.AtomicCheckpointIO("hash").save_checkpoint(content, path)
    return path.read_bytes(), state


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # its folder may be written over
@given(data=st.data())
def test_no_flipped_bit_changes_what_is_loaded(one, tmp_path, data):
    """Either the file counts as damaged, or its tensors are what they were."""
    whole, state = one
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "step-00000004.ckpt"
    path.write_bytes(changed)
    try:
        start = checkpoint.newest(tmp_path, "hash", lambda curves: None)
    except UserError:
        raise AssertionError("a flipped bit is no other config") from None
    if start.path is None:
        assert (tmp_path / "step-00000004.ckpt.damaged").exists()
    else:
        loaded = torch.load(start.path, weights_only=True)["state_dict"]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_fault_of_the_disk_is_not_taken_for_damage(one, tmp_path, monkeypatch):
    path = tmp_path / "step-00000004.ckpt"
    path.write_bytes(one[0])

    def broken_disk(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zipfile, "ZipFile", broken_disk)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.newest(tmp_path, "hash", lambda curves: None)
    assert path.exists()


def test_rows_after_a_checkpoint_are_dropped_to_the_byte(tmp_path):
    telemetry = MetricsLogger(tmp_path, 1, 10, 1, None)
    telemetry.file.write_text('{"step": 1}\n')
    state = telemetry.state_dict()
    with telemetry.file.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert telemetry.trouble(state) is None
    telemetry.rewind(state)
    assert telemetry.file.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("state", [5, {}, {"bytes": "all"}, {"bytes": 1.5, "sha256": ""}])
def test_a_checkpoint_that_does_not_say_which_rows_are_its_own_is_passed_over(tmp_path, state):
    assert "are damaged" in MetricsLogger(tmp_path, 1, 10, 1, None).trouble(state)
    saved_at(4, tmp_path / "step-00000004.ckpt")
    saved_at(8, tmp_path / "step-00000008.ckpt", callbacks=5)
    assert newest(tmp_path).step == 4


def saved_at(step, path, **parts):
    content = {"state_dict": {}, "global_step": step, "callbacks": {"MetricsLogger": {"bytes": 0, "sha256": ""}}}
    checkpoint.AtomicCheckpointIO("hash").save_checkpoint(content | parts, path)


def newest(folder):
    return checkpoint.newest(folder, "hash", lambda curves: None)


@pytest.mark.parametrize("claimed", [8, 99_999_999])
def test_the_step_is_the_one_inside_and_a_name_that_says_another_is_damage(tmp_path, claimed):
    saved_at(4, tmp_path / "step-00000004.ckpt")
    saved_at(3, tmp_path / f"step-{claimed:08d}.ckpt")
    start = newest(tmp_path)
    assert (start.path, start.step) == (tmp_path / "step-00000004.ckpt", 4)
    assert (tmp_path / f"step-{claimed:08d}.ckpt.damaged").exists()
    assert len(checkpoint.warnings(tmp_path)) == 1


def test_names_that_are_none_of_ours_are_left_alone(tmp_path):
    for name in ("step-new.ckpt", "step-4.ckpt", "step-.ckpt", "step-99999999999999999999.ckpt"):
        saved_at(4, tmp_path / name)
    assert newest(tmp_path).path is None
    assert not [*tmp_path.glob("*.damaged")]
    checkpoint.remove_periodic(tmp_path)
    assert len([*tmp_path.iterdir()]) == 4


def test_kept_weights_are_those_of_the_step_in_their_name(tmp_path):
    saved_at(4, tmp_path / "weights-00000004.ckpt")
    assert checkpoint.read(tmp_path / "weights-00000004.ckpt")["global_step"] == 4
    (tmp_path / "weights-00000004.ckpt").rename(tmp_path / "weights-00000008.ckpt")
    with pytest.raises(DamagedCheckpointError, match="it is of step 4"):
        checkpoint.read(tmp_path / "weights-00000008.ckpt")

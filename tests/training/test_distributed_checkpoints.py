"""FSDP2 saves a part on each rank: kills lose nothing, and another number of ranks resumes the run."""

import errno
import os
from multiprocessing import active_children

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.analysis.trained import load
from simbal.cli.resume import run_to_resume
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training import checkpoint, run, strategies
from simbal.training.checkpoint import DamagedCheckpointError
from simbal.training.run import train
from tests.training.run_files import assert_same_run, weights, without_speed
from tests.training.test_devices import leaves
from tests.training.test_faults import KilledError, kill_at

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]
SHARDED = ("trainer.devices=2", "trainer.micro_batch=2", "trainer.strategy=fsdp", "balancing=lf_lbl")


def kill_in_step(monkeypatch, step, spec):
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(KilledError):
            train(spec)


def saved(spec) -> list[str]:
    return sorted(path.name for path in (spec.path / "checkpoints").iterdir())


def killed(spec, patch, owner, name: str, after: bool, when=lambda *_: True) -> None:
    """Train until the first rank, in whose process this is, calls `owner.name`; all ranks end with it."""
    original = getattr(owner, name)

    def dies(*args, **kwargs):
        fatal = when(*args)
        found = original(*args, **kwargs) if after or not fatal else None
        if fatal:
            raise KilledError
        return found

    with patch.context() as now:
        now.setattr(owner, name, dies)
        with pytest.raises(KilledError):
            train(spec)
    assert active_children() == []


def test_a_run_killed_in_every_phase_of_a_save_resumes_to_the_same_bits(small_spec, finished, monkeypatch):
    keys = (*SHARDED, "trainer.ckpt_every=2")
    whole, broken = finished(*keys), small_spec(*keys)
    part = ".step-{:08d}.ckpt.part"
    killed(broken, monkeypatch, strategies, "publish", after=False, when=lambda _, target: "4" in target.name)
    assert saved(broken) == [part.format(4), "step-00000002.ckpt"]
    killed(broken, monkeypatch, checkpoint, "sync", after=False, when=lambda path: path.name == part.format(4))
    assert (broken.path / "checkpoints" / part.format(4) / "SHA256SUMS").exists()
    killed(broken, monkeypatch, strategies, "publish", after=True, when=lambda _, target: "4" in target.name)
    assert saved(broken) == ["step-00000002.ckpt", "step-00000004.ckpt"]
    killed(broken, monkeypatch, checkpoint, "remove", after=False, when=lambda path: path.name == "step-00000002.ckpt")
    assert saved(broken) == [f"step-{step:08d}.ckpt" for step in (2, 4, 6)]
    killed(broken, monkeypatch, run, "final_metrics", after=False)
    assert saved(broken) == ["final.ckpt", "step-00000010.ckpt", "step-00000012.ckpt"]
    train(broken)
    assert_same_run(whole, broken)
    assert saved(broken) == ["final.ckpt"]
    assert RunFolder(broken.path).read_record()["warnings"] == []


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_part_is_noticed_and_the_checkpoint_before_is_taken(small_spec, finished, monkeypatch, damage):
    whole, broken = finished(*SHARDED), small_spec(*SHARDED)
    kill_in_step(monkeypatch, 9, broken)
    part = broken.path / "checkpoints" / "step-00000008.ckpt" / "__1_0.distcp"
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-9])
    else:
        part.unlink()
    train(broken)
    assert_same_run(whole, broken)
    assert "step-00000008.ckpt was damaged" in RunFolder(broken.path).read_record()["warnings"][0]


def test_a_disk_that_is_full_in_mid_save_is_one_sentence(small_spec, monkeypatch):
    spec = small_spec(*SHARDED)
    original = strategies.publish

    def write(part, target):
        if target.name == "step-00000008.ckpt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(part, target)

    monkeypatch.setattr(strategies, "publish", write)
    with pytest.raises(UserError, match="^cannot write .*: No space left on device; free some space, or choose"):
        train(spec)
    assert "step-00000004.ckpt" in saved(spec)


def test_four_ranks_then_two_then_one_train_as_four(small_spec, finished, cache_dir, monkeypatch):
    """Six experts are two, two, two and none on four ranks."""
    more = ("trainer.devices=4", "trainer.pes_every=5", "model.num_experts=6", "balancing=[lf_lbl,ortho_param]")
    keys = (*SHARDED, *more)
    whole, moved = finished(*keys), small_spec(*keys)
    kill_in_step(monkeypatch, 5, moved)
    asked = [f"data.cache_dir={cache_dir}"]
    fewer = [
        run_to_resume(moved.path, OverridesParser.create().parse_overrides([*asked, f"trainer.devices={devices}"]))
        for devices in (2, 1)
    ]
    kill_in_step(monkeypatch, 9, fewer[0])
    assert saved(moved) == ["step-00000004.ckpt", "step-00000008.ckpt"]
    train(fewer[1])
    assert not any(path.is_dir() for path in (moved.path / "checkpoints").iterdir())
    for ours, theirs in zip(without_speed(moved), without_speed(whole), strict=True):
        assert dict(leaves(ours)) == pytest.approx(dict(leaves(theirs)), rel=2e-5, abs=1e-6)
    trained = weights(moved)
    assert all(torch.allclose(tensor, trained[name], atol=2e-5) for name, tensor in weights(whole).items())
    (warning,) = RunFolder(moved.path).read_record()["warnings"]
    assert warning == "devices changed, and with it the rounding: 4 from step 0, 2 from step 4, 1 from step 8"


def test_weights_are_one_file_that_analyses_read(small_spec, finished, cache_dir):
    spec = finished(*SHARDED, "balancing=simbal", "trainer.keep_every=6")
    assert saved(spec) == ["final.ckpt", "weights-00000006.ckpt", "weights-00000012.ckpt"]
    kept = load(spec.path / "checkpoints" / "weights-00000006.ckpt")
    assert not torch.equal(kept.model.head_VD, load(spec.path).model.head_VD)


def test_a_distributed_checkpoint_is_not_read_for_an_analysis(small_spec, monkeypatch):
    spec = small_spec(*SHARDED)
    kill_in_step(monkeypatch, 9, spec)
    with pytest.raises(DamagedCheckpointError, match="only resume its run"):
        checkpoint.read(spec.path / "checkpoints" / "step-00000008.ckpt")


def test_a_checkpoint_of_one_device_resumes_in_parts(small_spec, finished, cache_dir, monkeypatch):
    one = ("trainer.micro_batch=2", "balancing=lf_lbl")
    whole, moved = finished(*one), small_spec(*one)
    kill_in_step(monkeypatch, 9, moved)
    asked = [f"data.cache_dir={cache_dir}", "trainer.devices=2", "trainer.strategy=fsdp"]
    train(run_to_resume(moved.path, OverridesParser.create().parse_overrides(asked)))
    trained = weights(moved)
    assert all(torch.allclose(tensor, trained[name], atol=2e-5) for name, tensor in weights(whole).items())

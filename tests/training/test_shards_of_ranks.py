"""Ranks save each its own shard: kills lose nothing, another number of ranks goes on, and one process reads them."""

import os
import shutil
import signal
from multiprocessing import active_children

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.analysis.trained import load
from simbal.cli.again import run_of
from simbal.errors import UserError
from simbal.hf.export import export
from simbal.runs.folder import RunFolder
from simbal.training import checkpoint, run, shards
from simbal.training.checkpoint_file import opened_file, write_file
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


def test_a_run_killed_in_every_phase_of_a_save_goes_on_to_the_same_bits(small_spec, finished, monkeypatch):
    keys = (*SHARDED, "trainer.ckpt_every=2")
    whole, broken = finished(*keys), small_spec(*keys)
    writer, part = shards._Writer, ".step-{:08d}.ckpt.part"
    killed(broken, monkeypatch, writer, "prepare_global_plan", after=True, when=lambda w, _: "4" in w.folder.name)
    assert saved(broken) == [part.format(4), "step-00000002.ckpt"]
    killed(broken, monkeypatch, writer, "write_data", after=False)
    assert saved(broken) == [part.format(4), "step-00000002.ckpt"]
    killed(broken, monkeypatch, writer, "finish", after=False)
    assert {path.name for path in (broken.path / "checkpoints" / part.format(4)).iterdir()} == {
        "shard-00000.ckpt", "shard-00001.ckpt",
    }  # fmt: skip
    killed(broken, monkeypatch, shards, "write_file", after=True, when=lambda _, file: file.name == shards.REST)
    assert saved(broken) == [part.format(4), "step-00000002.ckpt"]
    killed(broken, monkeypatch, shards, "sync", after=False)
    assert saved(broken) == ["step-00000002.ckpt", "step-00000004.ckpt"]
    killed(broken, monkeypatch, shards, "remove", after=False, when=lambda path: path.is_dir())
    assert saved(broken) == [f"step-{step:08d}.ckpt" for step in (2, 4, 6)]
    killed(broken, monkeypatch, run, "final_metrics", after=False)
    assert saved(broken) == ["final.ckpt", "step-00000010.ckpt", "step-00000012.ckpt"]
    train(broken)
    assert_same_run(whole, broken)
    assert saved(broken) == ["final.ckpt"]
    assert RunFolder(broken.path).read_record()["warnings"] == []


def test_a_rank_that_is_killed_while_it_saves_loses_nothing(small_spec, finished, monkeypatch):
    whole, broken = finished(*SHARDED), small_spec(*SHARDED)
    original = shards._Writer.write_data

    def write(self, *rest):
        if self.folder.name == "step-00000008.ckpt":
            os.kill(active_children()[0].pid, signal.SIGKILL)
        return original(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(shards._Writer, "write_data", write)
        with pytest.raises(UserError, match="rank 1 has been killed by SIGKILL"):
            train(broken)
    assert "step-00000004.ckpt" in saved(broken)
    shutil.rmtree(broken.path / "checkpoints" / "step-00000008.ckpt", ignore_errors=True)  # the kill may have come late
    train(broken)
    assert_same_run(whole, broken)


def test_a_damaged_shard_is_noticed_and_the_one_before_is_taken(small_spec, finished, monkeypatch):
    whole, broken = finished(*SHARDED), small_spec(*SHARDED)
    kill_in_step(monkeypatch, 9, broken)
    shard = shards.shard_file(broken.path / "checkpoints" / "step-00000008.ckpt", 1)
    shard.write_bytes(shard.read_bytes()[:-9])
    train(broken)
    assert_same_run(whole, broken)
    assert "step-00000008.ckpt was damaged" in RunFolder(broken.path).read_record()["warnings"][0]


def test_four_ranks_then_two_then_one_train_as_four(small_spec, finished, cache_dir, monkeypatch):
    """Six experts are two, two, two and none on four ranks."""
    more = ("trainer.devices=4", "trainer.pes_every=5", "model.num_experts=6", "balancing=[lf_lbl,ortho_param]")
    keys = (*SHARDED, *more)
    whole, moved = finished(*keys), small_spec(*keys)
    kill_in_step(monkeypatch, 5, moved)
    asked = [f"run={moved.path}", f"data.cache_dir={cache_dir}"]
    fewer = [
        run_of(OverridesParser.create().parse_overrides([*asked, f"trainer.devices={devices}"])) for devices in (2, 1)
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
    assert warning == "devices changed, and with that the rounding: 4 from step 0, 2 from step 4, 1 from step 8"


def test_what_one_process_reads_of_shards_is_what_it_reads_of_a_file(small_spec, finished, cache_dir, tmp_path):
    sharded = finished(*SHARDED, "balancing=simbal", "trainer.keep_every=6")
    final = sharded.path / "checkpoints" / "final.ckpt"
    assert sorted(part.name for part in final.iterdir()) == ["rest.ckpt", "shard-00000.ckpt", "shard-00001.ckpt"]
    written = [opened_file(shards.shard_file(final, rank))["state_dict"].values() for rank in (0, 1)]
    numbers = [sum(tensor.numel() for tensor in tensors) for tensors in written]
    assert max(numbers) < 0.6 * sum(numbers)
    plain = tmp_path / "plain"
    shutil.copytree(sharded.path, plain)
    shutil.rmtree(plain / "checkpoints" / "final.ckpt")
    write_file(checkpoint.read(final), plain / "checkpoints" / "final.ckpt")
    for path, to in ((sharded.path, "first"), (plain, "second")):
        export(str(path), str(tmp_path / to), overwrite=False)
    first, second = ((tmp_path / to / "model.safetensors").read_bytes() for to in ("first", "second"))
    assert first == second
    kept = load(sharded.path / "checkpoints" / "weights-00000006.ckpt")
    assert not torch.equal(kept.model.head_VD, load(sharded.path).model.head_VD)


def test_a_checkpoint_of_one_device_goes_on_in_shards(small_spec, finished, monkeypatch):
    whole, earlier = finished(*SHARDED), small_spec(*SHARDED)
    kill_in_step(monkeypatch, 9, earlier)
    for folder in checkpoint.in_folder(earlier.path / "checkpoints"):
        content = checkpoint.read(folder)
        shutil.rmtree(folder)
        write_file(content, folder)
    train(earlier)
    assert_same_run(whole, earlier)
    assert (earlier.path / "checkpoints" / "final.ckpt").is_dir()

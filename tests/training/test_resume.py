"""A killed run resumes to the same bits as an uninterrupted run, no matter when it was killed."""

import pytest
from lightning import Trainer

from simbal.runs.folder import RunFolder
from simbal.training.checkpoint import Checkpoints
from simbal.training.module import LitMoE
from simbal.training.run import train
from tests.balancing.cases import CASES
from tests.training.run_files import KilledError, assert_same_run, train_killed, train_until


@pytest.mark.parametrize("step", [3, 9])
def test_a_killed_run_resumes_to_the_same_bits(small_spec, finished, monkeypatch, step):
    """Before the first checkpoint, and after it with rows that no checkpoint holds."""
    reference, killed = finished("trainer.micro_batch=4"), small_spec("trainer.micro_batch=4")
    train_until(monkeypatch, killed, step)
    assert not (killed.path / "record.json").exists()
    with (killed.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tok')  # a row cut off by the kill
    train(killed)
    assert_same_run(reference, killed)


def test_the_time_of_a_resumed_run_includes_the_time_up_to_the_checkpoint(small_spec, monkeypatch, capsys):
    spec = small_spec("trainer.max_steps=6", "trainer.progress_bar=true")
    monkeypatch.setattr(Checkpoints, "state_dict", lambda self: {"seconds": 1000.0})
    train_until(monkeypatch, spec, 5)
    train(spec)
    assert 1000 < RunFolder(spec.path).read_record()["seconds"] < 1100
    assert "0:16:4" in capsys.readouterr().out  # the progress bar: 1000 seconds and a few


# one strategy for each kind of state by default; the conformance suite resumes every strategy from a checkpoint
KINDS = ("lf", "uniform", "ortho_param", "[lbl,ernie_ortho]")
STATEFUL = {case.name.partition(",")[0] for case in CASES if case.make().state_dict()}
RESUMED = [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(STATEFUL.difference(KINDS)))]


@pytest.mark.parametrize("balancing", RESUMED)
def test_a_strategy_with_state_resumes_to_the_same_bits(small_spec, tmp_path, monkeypatch, balancing):
    """With accumulation, and with validation and PES at steps that have no checkpoint."""
    keys = [f"balancing={balancing}", "trainer.micro_batch=4", "trainer.pes_every=3", "trainer.val_every=5"]
    keys += ["trainer.max_steps=7"]
    if balancing.startswith("["):
        keys += ["balancing.lbl.scope=global", "balancing.ernie_ortho.decoupled=true"]
    reference, killed = (small_spec(*keys, output_dir=tmp_path / name) for name in "ab")
    train(reference)
    train_until(monkeypatch, killed, 6)
    train(killed)
    assert_same_run(reference, killed)


@pytest.mark.parametrize(
    ("owner", "method", "when"),
    [
        (LitMoE, "on_validation_epoch_end", lambda module: module.global_step == 6),  # after the checkpoint of step 6
        (LitMoE, "on_validation_epoch_end", lambda module: module.global_step == 12),
        (Trainer, "save_checkpoint", lambda trainer: not trainer.training and trainer.global_step == 12),  # final.ckpt
    ],
)
def test_a_run_killed_between_steps_resumes_to_the_same_files(small_spec, finished, monkeypatch, owner, method, when):
    reference, killed = finished("trainer.ckpt_every=6"), small_spec("trainer.ckpt_every=6")
    original = getattr(owner, method)

    def kill(self, *args, **kwargs):
        if when(self):
            raise KilledError
        return original(self, *args, **kwargs)

    train_killed(monkeypatch, killed, owner, method, kill)
    train(killed)
    assert_same_run(reference, killed)
    records = [RunFolder(spec.path).read_record() for spec in (reference, killed)]
    assert records[0]["metrics"] == records[1]["metrics"]
    assert records[1]["tokens_per_second"] > 0

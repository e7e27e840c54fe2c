"""A run that is killed, starved or refused goes on to the same result, or says in one sentence why not."""

import errno
import os
import shutil

import pytest
import torch
import yaml
from lightning import Trainer

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.callbacks import MetricsLogger
from tests.balancing.cases import CASES
from tests.training.run_files import assert_same_run


class KilledError(BaseException):
    """Not an Exception, so that nothing on the way can record a failure, as with kill -9."""


def kill_at(monkeypatch, step: int) -> None:
    original = MetricsLogger.on_train_batch_start

    def start(self, trainer, *rest):
        if trainer.global_step == step:
            raise KilledError
        original(self, trainer, *rest)

    monkeypatch.setattr(MetricsLogger, "on_train_batch_start", start)


@pytest.mark.parametrize(("step", "micro_batch"), [(3, 4), (6, 8), (9, 4)])
def test_a_killed_and_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    small_spec, finished, monkeypatch, step, micro_batch
):
    key = f"trainer.micro_batch={micro_batch}"
    whole, broken = finished(key), small_spec(key)
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(KilledError):
            train(broken)
    assert not (broken.path / "record.json").exists()
    with (broken.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tok')  # a row torn by the kill
    train(broken)
    assert_same_run(whole, broken)


# the conformance suite trains every strategy from a checkpoint; a whole run, a case for each kind of state by default
KINDS = ("lf", "remoe", "uniform", "ortho_param", "prototype", "[lbl,ernie_ortho]")
STATEFUL = {case.name.partition(",")[0] for case in CASES if case.make().state_dict()}
RESUMED = [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(STATEFUL.difference(KINDS)))]


@pytest.mark.parametrize("balancing", RESUMED)
def test_a_strategy_with_a_state_is_resumed_to_the_bit(small_spec, tmp_path, monkeypatch, balancing):
    """With accumulation, validation and PES at steps that no checkpoint shares."""
    keys = [f"balancing={balancing}", "trainer.micro_batch=4", "trainer.pes_every=3", "trainer.val_every=5"]
    keys += ["trainer.max_steps=7"]
    if balancing.startswith("["):
        keys += ["balancing.lbl.scope=global", "balancing.ernie_ortho.decoupled=true"]
    whole, broken = (small_spec(*keys, output_dir=tmp_path / name) for name in "ab")
    train(whole)
    with monkeypatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(KilledError):
            train(broken)
    train(broken)
    assert_same_run(whole, broken)


@pytest.mark.parametrize(
    ("owner", "method", "when"),
    [
        (LitMoE, "on_validation_epoch_end", lambda module: module.global_step == 6),  # after the checkpoint of step 6
        (LitMoE, "on_validation_epoch_end", lambda module: module.global_step == 12),
        (Trainer, "save_checkpoint", lambda trainer: not trainer.training and trainer.global_step == 12),  # the final
    ],
)
def test_a_run_killed_between_its_steps_is_resumed_to_the_same_files(
    small_spec, finished, monkeypatch, owner, method, when
):
    whole, broken = finished("trainer.ckpt_every=6"), small_spec("trainer.ckpt_every=6")
    original = getattr(owner, method)

    def dies(self, *args, **kwargs):
        if when(self):
            raise KilledError
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, dies)
        with pytest.raises(KilledError):
            train(broken)
    train(broken)
    assert_same_run(whole, broken)
    records = [RunFolder(spec.path).read_record() for spec in (whole, broken)]
    assert records[0]["metrics"] == records[1]["metrics"]
    assert records[1]["tokens_per_second"] > 0


def test_a_finished_run_whose_curves_are_damaged_is_done_again_to_the_same_result(small_spec, finished):
    whole, broken = finished(), small_spec()
    shutil.copytree(whole.path, broken.path)
    curves = broken.path / "metrics.jsonl"
    curves.write_text(curves.read_text().replace('"step": 6', '"step": 7', 1))
    assert not RunFolder(broken.path).finished(broken)
    train(broken)
    assert_same_run(whole, broken)
    (warning,) = RunFolder(broken.path).read_record()["warnings"]
    assert "metrics.jsonl is not what the run has written" in warning


def test_a_failure_in_training_is_recorded_and_the_next_try_starts_over(small_spec, monkeypatch):
    spec = small_spec()
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "_log", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(spec)
    record = RunFolder(spec.path).read_record()
    assert (record["status"], record["error"]) == ("failed", "ZeroDivisionError: division by zero")
    assert "Traceback" in (spec.path / "train.log").read_text()
    train(spec)
    assert RunFolder(spec.path).read_record()["status"] == "finished"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["experts=torch", "model.d_expert=6"], r"experts.backend=torch cannot run here: .* multiples of 4"),
        (["model.num_experts=20"], "num_experts=20 rows cannot be orthogonal in model.d_model=16"),
        (["balancing.simbal.gram_dtype=fp8"], "balancing.simbal.gram_dtype=fp8 is not one of fp32, bf16"),
        (["balancing=[lf,quantile]"], "lf and quantile both choose a token's experts"),
        (["balancing=ortho_param", "router.init=normal", "model.num_experts=20"], "20 rows cannot be orthogonal"),
        (["balancing=lbl", "model.top_k=4"], "every expert is always chosen"),
        (["trainer.accelerator=cuda"], "no CUDA device is visible"),
        (["data.documents=2", "data.document_tokens=20"], "needs 8"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence_and_leaves_no_folder(small_spec, overrides, says):
    spec = small_spec(*overrides)
    with pytest.raises(UserError, match=says):
        train(spec)
    assert not spec.path.parent.exists()


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_folder_of_another_config_is_refused_and_kept(small_spec, finished, is_finished):
    spec = small_spec()
    if is_finished:
        shutil.copytree(finished().path, spec.path)
    else:
        RunFolder(spec.path).write_spec(spec)
    file = spec.path / "config.yaml"
    changed = yaml.safe_load(file.read_text()) | {"seed": 7}
    file.write_text(yaml.safe_dump(changed))
    with pytest.raises(UserError, match="belongs to another config"):
        train(spec)
    assert yaml.safe_load(file.read_text()) == changed


def test_a_folder_that_another_process_writes_is_refused(small_spec):
    spec = small_spec()
    with RunFolder(spec.path).lock(), pytest.raises(UserError, match="is being written by"):
        train(spec)


def test_a_disk_that_fills_up_while_training_gives_one_sentence_and_the_run_can_go_on(
    small_spec, finished, monkeypatch
):
    whole, broken = finished(), small_spec()

    def full(*_):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch.save says it

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UserError, match=r"cannot write .*: No space left on device; free some space"):
            train(broken)
    assert RunFolder(broken.path).read_record()["status"] == "failed"
    assert list((broken.path / "checkpoints").iterdir()) == []
    train(broken)
    assert_same_run(whole, broken)

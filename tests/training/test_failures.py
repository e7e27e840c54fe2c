"""A run that fails, diverges or cannot start gives the reason in one sentence, and its record has the status."""

import errno
import json
import math
import os

import pytest
import torch
import yaml

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.runs.record import error_of
from simbal.training.callbacks import MetricsLogger
from simbal.training.failures import out_of_memory_as_user_error
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.validation import ValidationTotals
from tests.training.run_files import assert_same_run, checkpoints, rows, train_until, weights


def test_a_failure_is_recorded_and_the_next_attempt_starts_over(small_spec, monkeypatch):
    spec = small_spec("trainer.max_steps=4")
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "_write_progress", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(spec)
    record = RunFolder(spec.path).read_record()
    assert (record["status"], record["error"]) == ("failed", "ZeroDivisionError: division by zero")
    assert "Traceback" in (spec.path / "train.log").read_text()
    train(spec)
    assert RunFolder(spec.path).read_record()["status"] == "finished"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experts=torch", "model.d_expert=6"], r"experts.backend=torch"),
        (["model.num_experts=20"], "num_experts=20 .*model.d_model=16"),
        (["balancing.simbal.gram_dtype=fp8"], "balancing.simbal.gram_dtype=fp8 .*fp32, bf16"),
        (["balancing=[lf,quantile]"], "lf and quantile"),
        (["balancing=lbl", "model.top_k=4"], "every expert is always chosen"),
        (["trainer.accelerator=cuda"], "no CUDA device is visible"),
        (["data.documents=2", "data.document_tokens=20"], "needs 8"),
    ],
)
def test_a_run_that_cannot_start_leaves_no_folder(small_spec, overrides, message):
    spec = small_spec(*overrides)
    with pytest.raises(UserError, match=message):
        train(spec)
    assert not spec.path.parent.exists()


def test_a_folder_of_another_config_is_not_touched(small_spec):
    spec = small_spec()
    RunFolder(spec.path).write_spec(spec)
    file = spec.path / "config.yaml"
    changed = yaml.safe_load(file.read_text()) | {"seed": 7}
    file.write_text(yaml.safe_dump(changed))
    with pytest.raises(UserError, match="belongs to another config"):
        train(spec)
    assert yaml.safe_load(file.read_text()) == changed


def test_a_folder_locked_by_another_process_is_refused(small_spec):
    spec = small_spec()
    with RunFolder(spec.path).lock(), pytest.raises(UserError, match="is being written by"):
        train(spec)


def test_a_run_whose_disk_was_full_can_resume(small_spec, finished, monkeypatch):
    reference, failed = finished(), small_spec()

    def full(*_):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch.save reports it

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UserError, match=r"cannot write .*: No space left on device; free some space"):
            train(failed)
    assert RunFolder(failed.path).read_record()["status"] == "failed"
    assert checkpoints(failed) == []
    train(failed)
    assert_same_run(reference, failed)


def test_an_out_of_memory_error_suggests_a_smaller_micro_batch():
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), cublas):
        with pytest.raises(UserError, match="trainer.micro_batch"), out_of_memory_as_user_error():
            raise error
    with pytest.raises(UserError, match="trainer.micro_batch"), out_of_memory_as_user_error():
        torch.empty(2**50)
    with pytest.raises(RuntimeError, match="the loss is nan"), out_of_memory_as_user_error():
        raise RuntimeError("the loss is nan")


def spoil_loss(monkeypatch, step, value=math.nan, micro_batch=0):
    """Multiply the loss of one micro-batch of a step."""
    original, seen = LitMoE.training_step, []

    def training_step(self, window_BT, batch_idx):
        losses = original(self, window_BT, batch_idx)
        if self.global_step == step:
            seen.append(step)
            if len(seen) == micro_batch + 1:
                losses["loss"] = losses["loss"] * value
                self._losses[-1]["loss"] = losses["loss"].detach()
        return losses

    monkeypatch.setattr(LitMoE, "training_step", training_step)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_divergence_is_recorded_with_its_step_and_the_norms_of_each_layer(small_spec, monkeypatch, value):
    spec = small_spec("trainer.micro_batch=4")
    spoil_loss(monkeypatch, 6, value, micro_batch=1)
    with pytest.raises(UserError, match="diverged at step 7: the loss is not finite"):
        train(spec)
    record = RunFolder(spec.path).read_record()
    assert (record["status"], record["step"], len(record["layers"])) == ("diverged", 7, 2)
    assert error_of(record).count("diverged") == 1
    for layer in record["layers"]:
        assert layer["router/nonfinite_gradients"] == 4 * 16
        assert layer["router/gradient_norm"] is None
        assert layer["router/weight_norm"] > 0
        assert layer["train/max_vio"] >= 0
    assert checkpoints(spec) == ["step-00000004.ckpt"]
    checkpoint = torch.load(spec.path / "checkpoints" / "step-00000004.ckpt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())


def test_an_infinite_gradient_of_a_finite_loss_is_divergence(small_spec, monkeypatch):
    spec = small_spec()
    original = LitMoE.configure_gradient_clipping

    def clip(self, *args, **kwargs):
        self.model.head_VD.grad[0, 0] = math.inf
        original(self, *args, **kwargs)

    monkeypatch.setattr(LitMoE, "configure_gradient_clipping", clip)
    with pytest.raises(UserError, match="diverged at step 1: the gradient is not finite"):
        train(spec)
    layers = RunFolder(spec.path).read_record()["layers"]
    assert [layer["experts/nonfinite_gradients"] for layer in layers] == [0, 0]


def test_an_infinite_perplexity_is_divergence(small_spec, monkeypatch):
    add = ValidationTotals.add
    monkeypatch.setattr(ValidationTotals, "add", lambda self, nll_N, *rest: add(self, nll_N * 1e3, *rest))
    spec = small_spec()
    with pytest.raises(UserError, match="diverged at step 0: the perplexity of the validation is not finite"):
        train(spec)
    assert RunFolder(spec.path).read_record()["status"] == "diverged"


def test_an_infinite_metric_of_a_finite_loss_is_divergence(small_spec):
    with pytest.raises(UserError, match=r"diverged at step 1: the \(R\^T R - I\)\^2 of the validation is not finite"):
        train(small_spec("optim.lr=1e30", "trainer.val_every=1"))


def test_a_skipped_step_changes_nothing(small_spec, monkeypatch):
    keys = ("trainer.skip_nonfinite=1", "trainer.log_every=1", "balancing=lf_lbl", "trainer.micro_batch=4")
    spec = small_spec(*keys, "trainer.max_steps=8")
    unchanged = []
    original = LitMoE.optimizer_step

    def optimizer_step(self, *args, **kwargs):
        before, step = {name: tensor.clone() for name, tensor in self.state_dict().items()}, self.global_step
        original(self, *args, **kwargs)
        if all(torch.equal(tensor, before[name]) for name, tensor in self.state_dict().items()):
            unchanged.append(step)

    monkeypatch.setattr(LitMoE, "optimizer_step", optimizer_step)
    spoil_loss(monkeypatch, 6)
    train(spec)
    assert unchanged == [6]
    assert RunFolder(spec.path).read_record()["skipped_steps"] == 1
    logged = {row["step"]: row for row in rows(spec, "train/skipped_steps")}
    assert [logged[step]["train/skipped_steps"] for step in (6, 7, 8)] == [0, 1, 1]
    assert "train/loss" not in logged[7]  # it is NaN, which JSON does not have
    assert all(tensor.isfinite().all() for tensor in weights(spec).values() if tensor.is_floating_point())
    json.loads((spec.path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_one_more_bad_step_than_may_be_skipped_ends_the_run_also_after_a_kill(small_spec, monkeypatch):
    spec = small_spec("trainer.skip_nonfinite=1")
    spoil_loss(monkeypatch, 3)
    train_until(monkeypatch, spec, 5)
    spoil_loss(monkeypatch, 6)
    with pytest.raises(UserError, match="diverged at step 7: the loss is not finite"):
        train(spec)

"""A run whose loss or gradient is not finite stops, says where and how, or skips the step if it may."""

import json
import math

import pytest
import torch

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.validation import ValidationTotals
from tests.training.run_files import assert_same_run, rows, weights
from tests.training.test_faults import KilledError, kill_at


def spoil(monkeypatch, step, loss=math.nan, micro_batch=0):
    """The loss of one micro-batch of a step."""
    original, seen = LitMoE.training_step, []

    def training_step(self, window_BT, batch_idx):
        out = original(self, window_BT, batch_idx)
        if self.global_step == step:
            seen.append(step)
            if len(seen) == micro_batch + 1:
                out["loss"] = out["loss"] * loss
                self._losses[-1]["loss"] = out["loss"].detach()
        return out

    monkeypatch.setattr(LitMoE, "training_step", training_step)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_it_stops_with_the_step_and_the_layers_in_its_record(small_spec, monkeypatch, loss):
    spec = small_spec("trainer.micro_batch=4")
    spoil(monkeypatch, 6, loss, micro_batch=1)
    with pytest.raises(UserError, match=r"diverged: the loss is not finite in step 7; a smaller optim.lr may help"):
        train(spec)
    record = RunFolder(spec.path).read_record()
    assert record["status"] == "diverged"
    assert record["step"] == 7
    assert len(record["layers"]) == 2
    for layer in record["layers"]:
        assert layer["router/nonfinite_gradients"] == 4 * 16
        assert layer["router/gradient_norm"] is None
        assert layer["router/weight_norm"] > 0
        assert layer["train/max_vio"] >= 0
    assert [path.name for path in (spec.path / "checkpoints").iterdir()] == ["step-00000004.ckpt"]
    checkpoint = torch.load(spec.path / "checkpoints" / "step-00000004.ckpt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_found(small_spec, monkeypatch):
    spec = small_spec()
    original = LitMoE.configure_gradient_clipping

    def clip(self, *args, **kwargs):
        if self.global_step == 3:
            self.model.head_VD.grad[0, 0] = math.inf
        original(self, *args, **kwargs)

    monkeypatch.setattr(LitMoE, "configure_gradient_clipping", clip)
    with pytest.raises(UserError, match="diverged: the gradient is not finite in step 4"):
        train(spec)
    layers = RunFolder(spec.path).read_record()["layers"]
    assert [layer["experts/nonfinite_gradients"] for layer in layers] == [0, 0]


def test_a_finite_loss_whose_perplexity_is_not_is_divergence_too(small_spec, monkeypatch):
    add = ValidationTotals.add
    monkeypatch.setattr(ValidationTotals, "add", lambda self, nll_N, *parts: add(self, nll_N * 1e3, *parts))
    spec = small_spec()
    with pytest.raises(UserError, match="diverged: the perplexity of the validation is not finite in step 0"):
        train(spec)
    assert RunFolder(spec.path).read_record()["status"] == "diverged"


def test_a_rate_that_is_too_large_is_found_in_earnest(small_spec):
    spec = small_spec("optim.lr=1e30", "optim.grad_clip=0")
    with pytest.raises(UserError, match="diverged: "):
        train(spec)
    assert RunFolder(spec.path).read_record()["status"] == "diverged"


def test_steps_may_be_skipped_and_change_nothing(small_spec, monkeypatch):
    spec = small_spec("trainer.skip_nonfinite=1", "trainer.log_every=1", "balancing=lf_lbl", "trainer.micro_batch=4")
    before = {}
    original = LitMoE.optimizer_step

    def optimizer_step(self, *args, **kwargs):
        kept = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        step = self.global_step
        original(self, *args, **kwargs)
        before[step] = all(torch.equal(tensor, kept[name]) for name, tensor in self.state_dict().items())

    monkeypatch.setattr(LitMoE, "optimizer_step", optimizer_step)
    spoil(monkeypatch, 6)
    train(spec)
    assert [step for step, unchanged in before.items() if unchanged] == [6]
    assert RunFolder(spec.path).read_record()["skipped_steps"] == 1
    logged = {row["step"]: row["train/skipped_steps"] for row in rows(spec) if "train/skipped_steps" in row}
    assert [logged[step] for step in (6, 7, 12)] == [0, 1, 1]
    (skipped,) = [row for row in rows(spec) if row["step"] == 7]
    assert "train/loss" not in skipped  # no number
    assert all(tensor.isfinite().all() for tensor in weights(spec).values() if tensor.is_floating_point())
    json.loads((spec.path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_one_bad_step_too_many_ends_the_run(small_spec, monkeypatch):
    spec = small_spec("trainer.skip_nonfinite=1")
    spoil(monkeypatch, 3)
    spoil(monkeypatch, 6)
    with pytest.raises(UserError, match="the loss is not finite in step 7"):
        train(spec)


def test_the_count_goes_on_after_a_kill(small_spec, monkeypatch, tmp_path):
    whole, broken = (small_spec("trainer.skip_nonfinite=2", output_dir=tmp_path / name) for name in "ab")
    for spec in (whole, broken):
        with monkeypatch.context() as patch:
            spoil(patch, 2)
            if spec is broken:
                kill_at(patch, 7)
                with pytest.raises(KilledError):
                    train(spec)
            else:
                train(spec)
    train(broken)
    assert_same_run(whole, broken)
    assert RunFolder(broken.path).read_record()["skipped_steps"] == 1

"""A finished step holds what its micro-batches measured, and every observer gets it once."""

import torch

from simbal.conformance import B, S, tiny_module
from simbal.conformance import train as train_tiny
from simbal.distributed import sum_over_ranks
from simbal.runs.folder import RunFolder
from simbal.training.module import LitMoE
from simbal.training.run import train
from tests.balancing.cases import CASES
from tests.training.run_files import rows


class Recorder:
    """An observer that keeps what it is given."""

    def __init__(self) -> None:
        self.steps, self.validations = [], []

    def wants_aux_gradient(self, number):
        return number % 2 == 0

    def observe_step(self, step):
        self.steps.append(step)

    def observe_validation(self, validation):
        self.validations.append(validation)


def test_a_finished_step_has_the_losses_of_each_micro_batch_and_the_counts_of_all():
    module = tiny_module(next(case for case in CASES if case.name == "lbl"))
    first, second = train_tiny(module, range(2), micro_batches=2)
    assert (first.number, second.number) == (1, 2)
    assert [len(step.losses) for step in (first, second)] == [2, 2]
    losses = [micro["loss"] for micro in first.losses]
    assert not any(loss.requires_grad for loss in losses)
    assert first.mean_losses()["loss"] == torch.stack(losses).double().mean()
    assert sum_over_ranks(first.counts_LE).sum(1).tolist() == [B * S * module.model.shape.top_k] * len(first.counts_LE)
    assert first.skipped_steps is None


def test_an_observer_gets_each_step_and_each_validation_once(small_spec, monkeypatch):
    recorder, original = Recorder(), LitMoE.configure_model

    def observed(module):
        if recorder not in module.observers:
            module.observers.append(recorder)
        original(module)

    monkeypatch.setattr(LitMoE, "configure_model", observed)
    spec = small_spec("trainer.micro_batch=4")
    train(spec)
    assert [step.number for step in recorder.steps] == [*range(1, 13)]
    assert len(recorder.validations) == 4  # before the first step, after steps 6 and 12, and of the whole split
    logged = {row["step"]: row for row in rows(spec) if "train/loss" in row}
    for step in recorder.steps[1::2]:
        row = logged[step.number]
        assert row["train/ce"] == step.mean_losses()["ce"]
        assert row["train/grad_norm"] == step.grad_norm.item()
        assert row["train/clipped"] == step.clipped.item()
    record = RunFolder(spec.path).read_record()
    assert record["metrics"] == recorder.validations[-1].metrics

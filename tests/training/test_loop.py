"""A run trains as its config says: its losses, rates, clipping and weights are those of a loop that is written out."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from simbal.data.prepare import prepare
from simbal.training import telemetry
from simbal.training.build import build_data, build_module
from simbal.training.optimizer import lr_factor
from simbal.training.run import train
from tests.training.run_files import rows, weights

KEYS = ("balancing=lbl", "trainer.max_steps=5", "trainer.log_every=1", "optim.lr=0.05", "optim.betas=[0.8,0.9]",
        "optim.eps=1e-3", "optim.weight_decay=0.3", "optim.grad_clip=0.5", "optim.z_loss_coef=0.1")  # fmt: skip


def test_a_run_is_adamw_on_the_clipped_gradient_of_all_losses(small_spec):
    spec = small_spec(*KEYS)
    train(spec)
    store, (lr, (b1, b2), eps, decay) = prepare(spec.config.data, progress=False), (0.05, (0.8, 0.9), 1e-3, 0.3)
    module = build_module(spec, store, torch.device("cpu"), "32-true")
    loader = build_data(spec, store).train_dataloader()
    parameters = dict(module.model.named_parameters())
    m, v = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    for step in range(5):
        (window_BT,) = loader.micro_batches(step)
        hidden_BSD, routings = module.model(window_BT[:, :-1], module.balancing)
        logits_NV = hidden_BSD.flatten(0, 1) @ module.model.head_VD.T
        z_loss = 0.1 * logits_NV.logsumexp(-1).square().mean()
        aux = module.balancing.losses(routings)["lbl"]
        loss = F.cross_entropy(logits_NV, window_BT[:, 1:].flatten()) + z_loss + aux
        gradients = dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        rate = lr * lr_factor(step, 2, 5)
        with torch.no_grad():
            for name, p in parameters.items():
                g = gradients[name] * min(1.0, 0.5 / norm)
                m[name], v[name] = b1 * m[name] + (1 - b1) * g, b2 * v[name] + (1 - b2) * g**2
                first, second = m[name] / (1 - b1 ** (step + 1)), v[name] / (1 - b2 ** (step + 1))
                p.sub_(rate * (first / (second.sqrt() + eps) + decay * p * (p.ndim > 1)))
        row = next(row for row in rows(spec) if row["step"] == step + 1 and "lr" in row)
        assert row["lr"] == pytest.approx(lr * lr_factor(step + 1, 2, 5))
        assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        load_LE = torch.stack([routing.tokens_per_expert_E for routing in routings]).double()
        assert row["train/max_vio"] == pytest.approx((load_LE.amax(1) / load_LE.mean(1) - 1).mean().item(), abs=1e-6)
    for name, trained in weights(spec).items():
        torch.testing.assert_close(parameters[name.removeprefix("model.")].detach(), trained, rtol=1e-3, atol=1e-5)


def test_the_speed_is_that_of_steps_by_their_seconds(small_spec, monkeypatch):
    seconds = itertools.count()  # one for each micro-batch
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    spec = small_spec("trainer.micro_batch=4")
    train(spec)
    assert {row["tokens_per_second"] for row in rows(spec) if "train/ce" in row} == {8 * 16 / 2}

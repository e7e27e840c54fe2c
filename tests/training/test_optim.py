"""The learning rate at the steps that can be worked out by hand, and who decays."""

import pytest
import torch
from torch import nn

from simbal.config.schema import OptimConfig
from simbal.training.optimizer import build_optimizer, lr_factor, parameter_groups

SETTINGS = OptimConfig(
    lr=5e-4,
    weight_decay=0.01,
    betas=[0.9, 0.95],
    eps=1e-8,
    decay_router=False,
    warmup_steps=2000,
    z_loss_coef=0,
    grad_clip=0,
    aux_layer_reduce="sum",
)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 5e-5), (1000, 2.75e-4), (2000, 5e-4), (10500, 2.75e-4), (19000, 5e-5), (20000, 5e-5)]
)
def test_schedule_of_the_papers_m_models(step, rate):
    assert 5e-4 * lr_factor(step, 2000, 19_000) == pytest.approx(rate)


def test_schedule_of_the_papers_l_models_half_way():
    assert 3e-4 * lr_factor(38_500, 2000, 75_000) == pytest.approx(1.65e-4)


def test_the_optimizer_follows_the_schedule_from_its_first_step():
    weight = nn.Linear(2, 2)
    optimizer, scheduler = build_optimizer(weight, SETTINGS, 19_000)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([5e-4 * lr_factor(s, 2000, 19_000) for s in range(3)])


def test_norms_never_decay_and_routers_only_if_told():
    model = nn.ModuleDict(
        {"router": nn.Linear(3, 2, bias=False), "norm": nn.RMSNorm(3), "out": nn.Linear(3, 5, bias=False)}
    )
    decayed, plain = parameter_groups(model, SETTINGS)
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 3)]
    assert plain["weight_decay"] == 0
    assert {tuple(p.shape) for p in plain["params"]} == {(2, 3), (3,)}
    assert torch.equal(model["norm"].weight, torch.ones(3))

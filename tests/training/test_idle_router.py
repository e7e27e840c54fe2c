"""A router that the language model cannot train is warned of, and no other is."""

import pytest
import torch

from simbal.data.store import prepare
from simbal.model.router import Router
from simbal.runs.folder import RunFolder
from simbal.training.build import build_module
from simbal.training.run import train

ONE = "model.top_k=1"


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ((ONE, "balancing=none"), True), ((ONE, "balancing=lbl"), True), ((ONE, "router=sigmoid"), True),
        ((ONE, "balancing=capacity"), True), ((ONE, "balancing=capacity", "router.renormalize=false"), False),
        ((ONE, "balancing=none", "router.renormalize=false"), False), ((ONE, "balancing=top_p"), False),
        (("balancing=none",), False), ((ONE, "balancing=none", "model.num_experts=0"), None),
    ],
)  # fmt: skip
def test_the_warning_is_there_where_the_gradient_is_not(small_spec, keys, idle):
    spec = small_spec("trainer.max_steps=1", "optim.warmup_steps=0", *keys)
    train(spec)
    warnings = RunFolder(spec.path).read_record()["warnings"]
    assert any("only a balancing loss trains the router" in warning for warning in warnings) is bool(idle)
    module = build_module(spec, prepare(spec.config.data, progress=False), torch.device("cpu"), "32-true")
    hidden_BSD, _ = module.model(torch.arange(64).view(4, 16), module.balancing)
    (hidden_BSD * torch.randn_like(hidden_BSD)).sum().backward()
    weights = [w for part in module.model.modules() if isinstance(part, Router) for w in part.parameters()]
    gradients = [0.0 if weight.grad is None else weight.grad.abs().max().item() for weight in weights]
    if idle is None:
        assert gradients == []
    else:
        assert [gradient < 1e-5 for gradient in gradients] == [idle] * 2, gradients

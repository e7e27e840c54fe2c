"""docs/examples/simbal_in_olmo_core.py fills the missing router loss of OLMo-core 3, here a stub of its interface."""

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

EXAMPLE = Path(__file__).parents[2] / "docs/examples/simbal_in_olmo_core.py"
E, D, COEF, MICROBATCH = 4, 8, 0.1, 16  # MICROBATCH: tokens


class MoERouterV2(nn.Module):
    """The parts of ai2-olmo-core 3.0.0's router on which the example depends."""

    def __init__(self, *, d_model, num_experts, top_k, orth_loss_weight=None):
        super().__init__()
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.orth_loss_weight = orth_loss_weight
        self.weight = nn.Parameter(torch.randn(num_experts * d_model) * 0.02)

    def forward(self, x_BSD, scores_only, *, loss_div_factor=None):
        scores_BSE = (x_BSD @ self.weight.view(self.num_experts, self.d_model).T).softmax(-1)
        weights_BSK, experts_BSK = scores_BSE.topk(self.top_k)
        return weights_BSK, experts_BSK, None, (scores_BSE, loss_div_factor)

    def compute_aux_loss(self, scores_BSE, loss_div_factor):
        return self.orth_loss_weight * (self.compute_orthogonal_loss() * (1 / loss_div_factor))

    def compute_orthogonal_loss(self):
        raise NotImplementedError


@pytest.fixture
def example(monkeypatch, capsys):
    """Run the example; return its variables and the numbers that it prints."""
    package = "olmo_core"
    for part in ("", ".nn", ".moe", ".v2", ".router"):
        package += part
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    sys.modules[package].MoERouterV2 = type("MoERouterV2", (MoERouterV2,), {})
    return runpy.run_path(str(EXAMPLE)), [float(number) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]


def test_the_router_becomes_orthonormal(example):
    variables, (before, after) = example
    assert after < before / 20
    rows_ED = variables["router"].weight.detach().view(8, 64)
    torch.testing.assert_close(rows_ED @ rows_ED.T, torch.eye(8), atol=0.01, rtol=0)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_the_micro_batches_of_a_step_add_up_to_the_coefficient(example, num_micro_batches):
    variables, _ = example
    weight = variables["orth_loss_weight"](COEF, MICROBATCH)
    router = variables["MoERouterV2"](d_model=D, num_experts=E, top_k=2, orth_loss_weight=weight)
    for _ in range(num_micro_batches):
        *_, routing = router(torch.randn(1, MICROBATCH, D), False, loss_div_factor=num_micro_batches * MICROBATCH)
        router.compute_aux_loss(*routing).backward()
    rows_ED = router.weight.detach().view(E, D)
    signs_EE = (rows_ED @ rows_ED.T - torch.eye(E)).sign()
    torch.testing.assert_close(router.weight.grad.view(E, D), 2 * COEF * signs_EE @ rows_ED)

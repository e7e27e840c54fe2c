"""The rule of each router is detected, and decides like the code of transformers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from simbal.hf.routers import RULES, Rule, find_routers, probe
from tests.hf.architectures import NAMES, RULE, E, K, architecture


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_rule_is_found_and_decides_as_the_router_does(name):
    """Checked with the model's own weights and a nonzero bias, which the probe does not use."""
    model, seen = architecture(name), []
    routers = find_routers(model)
    assert {(router.rule, router.top_k, *router.weight_ED.shape) for router in routers} == {(RULE[name][0], K, E, 32)}
    assert [router.layer for router in routers] == [*range(len(routers))]
    router = routers[-1]
    if router.bias is not None:
        nn.init.normal_(router.bias, std=0.2)
    router.module.register_forward_hook(lambda module, args, output: seen.extend(output))
    model(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1)))
    logits_NE, weights_NK, experts_NK = (tensor.flatten(0, -2) for tensor in seen)
    chosen_NK, ours_NK = router.rule.decide(logits_NE, K, router.bias_E)
    ours_NE, theirs_NE = (
        torch.zeros(len(logits_NE), E).scatter(1, *pair) for pair in ((chosen_NK, ours_NK), (experts_NK, weights_NK))
    )
    torch.testing.assert_close(ours_NE, theirs_NE, rtol=1e-4, atol=1e-5)


class DistanceRouter(nn.Module):
    """A router that follows none of the known rules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, 32))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = x_ND @ self.weight.T
        weights_NK, experts_NK = (1 / (1 + (-logits_NE).exp().log1p())).topk(K)
        return logits_NE, weights_NK, experts_NK


@dataclass(frozen=True)
class Distance(Rule):
    """Its rule, as a user would add it."""

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        if isinstance(module, DistanceRouter):
            yield cls("sigmoid", renormalize=False)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        return (1 / (1 + (-logits_NE).exp().log1p())).gather(1, experts_NK)


def test_a_users_rule_is_found_by_what_it_computes(monkeypatch):
    assert probe(DistanceRouter(), "weight", None) is None
    monkeypatch.setattr("simbal.hf.routers.RULES", [*RULES, Distance])
    found = probe(DistanceRouter(), "weight", None)
    assert found is not None
    assert (type(found[0]), found[1]) == (Distance, K)

"""Each router of transformers is found to follow the rule that its own code computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from simbal.hf.routers import RULES, HFRouter, Rule, find_routers, probe
from tests.hf.architectures import RULE, E, K, architecture


@pytest.mark.parametrize("name", RULE)
def test_the_rule_of_every_architecture_is_found(name):
    routers = find_routers(architecture(name))
    assert {(router.rule, router.top_k, *router.weight_ED.shape) for router in routers} == {(RULE[name][0], K, E, 32)}
    assert [router.layer for router in routers] == [*range(len(routers))]


@pytest.mark.parametrize("name", RULE)
def test_the_rule_decides_as_the_router_does(name):
    """On other numbers than those by which it was found: the model's own weights, and a bias that is not 0."""
    model = architecture(name)
    router = find_routers(model)[-1]
    if router.bias is not None:
        nn.init.normal_(router.bias, std=0.2)
    logits_NE, weights_NK, experts_NK = decided(model, router)
    chosen_NK, ours_NK = router.rule.decide(logits_NE, K, router.bias_E)
    ours_NE, theirs_NE = (
        torch.zeros(len(logits_NE), E).scatter(1, *pair) for pair in ((chosen_NK, ours_NK), (experts_NK, weights_NK))
    )
    torch.testing.assert_close(ours_NE, theirs_NE, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def decided(model: nn.Module, router: HFRouter) -> list[Tensor]:
    """What a router returns in a forward pass of its model."""
    seen: list[Tensor] = []
    handle = router.module.register_forward_hook(lambda module, args, output: seen.extend(output))
    model(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1)))
    handle.remove()
    return [tensor.flatten(0, -2) for tensor in seen]


class TopByDistance(nn.Module):
    """A router of nobody's."""

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
        if isinstance(module, TopByDistance):
            yield cls("sigmoid", renormalize=False)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        return (1 / (1 + (-logits_NE).exp().log1p())).gather(1, experts_NK)


def test_a_rule_of_ones_own_is_found_by_what_it_computes(monkeypatch):
    assert probe(TopByDistance(), "weight", None) is None
    monkeypatch.setattr("simbal.hf.routers.RULES", [*RULES, Distance])
    found = probe(TopByDistance(), "weight", None)
    assert found is not None
    assert (type(found[0]), found[1]) == (Distance, K)

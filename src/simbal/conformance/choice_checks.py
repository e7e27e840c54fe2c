"""What every strategy promises of the experts that it chooses, and of their weights, above all where they are ragged.

Each promise is a function that raises AssertionError if it is broken.
Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from simbal.balancing.base import Balancing
from simbal.balancing.composition import Composition
from simbal.conformance.case import Case
from simbal.conformance.loss_checks import TOKENS_BS, E, K, random
from simbal.model.router import Router, Routing

PREFIX = 5  # tokens of each sequence


def routed(case: Case, strategy: Balancing, logits_NE: Tensor, tokens_BS: Tensor = TOKENS_BS) -> Routing:
    """Return the routing by fp64 logits as they are."""
    router = Router(E, E, K, case.gating, case.renormalize, layer=0).double()
    torch.nn.init.eye_(router.weight_ED)
    router.keeps_input = True
    routing: Routing = router(logits_NE, tokens_BS, Composition({"it": strategy}, {}))
    return routing


def trained(case: Case) -> Balancing:
    """Return the strategy after two steps on random logits."""
    strategy = case.make()
    for seed in (1, 2):
        routings = [routed(case, strategy, random(24, E, seed=seed))] * 2
        balancing = Composition({"it": strategy}, {})
        balancing.update(balancing.measure(routings), 1, [torch.eye(E, requires_grad=True)] * 2, 0.1, 0)
    return strategy


def a_prefix_is_routed_as_in_the_whole(case: Case) -> None:
    """Check that nothing of a token depends on those after it: in evaluation, and in training if it is causal."""
    strategy, logits_NE = trained(case), random(24, E, seed=3)
    beginning = torch.arange(24).view_as(TOKENS_BS)[:, :PREFIX].flatten()
    for training in (False, True) if strategy.properties.causal else (False,):
        strategy.train(training)
        whole = routed(case, strategy, logits_NE)
        prefix = routed(case, strategy, logits_NE[beginning], TOKENS_BS[:, :PREFIX])
        assert torch.equal(whole.topk_experts_NK[beginning], prefix.topk_experts_NK)
        assert torch.equal(whole.topk_probs_NK[beginning], prefix.topk_probs_NK)


def weights_are_those_of_the_chosen(case: Case) -> None:
    """Check each weight against the probabilities: by their sum over the chosen, dropped ones included, or as it is."""
    for mode in (True, False):
        strategy = trained(case).train(mode)
        routing = routed(case, strategy, random(24, E, seed=3))
        scores_NE = torch.zeros(24, E + 1, dtype=torch.float64)
        scores_NE[:, :E] = routing.probs_NE
        among_NK = routing.unsteered_experts_NK if strategy.ragged and strategy.drops else routing.topk_experts_NK
        if case.renormalize:
            scores_NE /= scores_NE.gather(1, among_NK).sum(1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(routing.topk_probs_NK, scores_NE.gather(1, routing.topk_experts_NK))


CHECKS: list[Callable[[Case], None]] = [
    a_prefix_is_routed_as_in_the_whole,
    weights_are_those_of_the_chosen,
]

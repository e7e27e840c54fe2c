"""Values of each loss for two routings, computed by hand, including the coefficient.

Uniform: all experts are equally probable and equally used, and W = 0. Collapsed: expert 0 takes every token, up to
terms of exp(-SCALE): x = v, and every row of W is SCALE times this unit vector v, negated for all experts except 0.
In both, every weight of expert i is i + 1, and the hidden width is 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch

from simbal.balancing.base import Balancing
from simbal.balancing.coupling import ExpertRouterCoupling
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss, RouterZLoss
from simbal.balancing.ragged import ReMoE, TopP
from simbal.balancing.weight_losses import ErnieOrthogonalLoss, ExpertOverlap, OffDiagonalCosine, RowNorm, SimBal
from simbal.conformance import TOKENS_BS, Case, D, E, K, losses
from simbal.model.router import ExpertWeights, Router

SCALE = 20.0


def uniform_lbl(lbl: Any) -> float:
    """f = K/E; P = 1/E, times K/E for raw sparse gates."""
    value = K * K / E if lbl.gates == "sparse_raw" else K
    return lbl.coef * value / (1 if lbl.norm == "E" else K)


def collapsed_lbl(lbl: Any) -> float:
    """f_0 = P_0 = 1."""
    return lbl.coef * E / (1 if lbl.norm == "E" else K)


def uniform_simbal(simbal: Any) -> float:
    """W W^T = 0: E ones on the diagonal."""
    return simbal.coef * E / (1 if simbal.reduction == "sum" else E**2)


def collapsed_simbal(simbal: Any) -> float:
    """Every entry of W W^T is SCALE^2 or -SCALE^2; the identity is subtracted from E of them."""
    return simbal.coef * (E**2 * SCALE**2 - E) / (1 if simbal.reduction == "sum" else E**2)


def collapsed_remoe(remoe: Any) -> float:
    """The only positive logit is SCALE, of expert 0, with a load of 1/K."""
    return remoe.coef * SCALE * (E / K if remoe.balanced else 1)


def collapsed_erc(erc: Any) -> float:
    """M_ij = SCALE * (j + 1) for every i."""
    over = [max(j - erc.alpha * i, 0) + max(i - erc.alpha * i, 0) for i, j in permutations(range(1, E + 1), 2)]
    return erc.coef * SCALE * sum(over) / E**2


VALUES: dict[type[Balancing], tuple[Callable[[Any], float], Callable[[Any], float]]] = {
    LoadBalancingLoss: (uniform_lbl, collapsed_lbl),
    PooledLoadBalancingLoss: (lambda lbl: lbl.coef * K, lambda lbl: lbl.coef * E),  # f = K/E, P = 1/E; f_0 = P_0 = 1
    SimBal: (uniform_simbal, collapsed_simbal),
    # rows of length 0 have no direction, n = 0; all rows parallel
    ErnieOrthogonalLoss: (lambda ernie: ernie.coef / E, lambda ernie: ernie.coef * (1 - 1 / E)),
    OffDiagonalCosine: (lambda cosine: 0.0, lambda cosine: cosine.coef),
    # every row has length 0; length SCALE
    RowNorm: (lambda norm: norm.coef, lambda norm: norm.coef * (SCALE - 1) ** 2),
    # every logit is 0
    ReMoE: (lambda remoe: 0.0, collapsed_remoe),
    # all experts are equally probable; one is certain
    TopP: (lambda top_p: top_p.coef * math.log(E), lambda top_p: 0.0),
    # all logits are 0; only the logit of expert 0 counts
    RouterZLoss: (lambda z_loss: z_loss.coef * math.log(E) ** 2, lambda z_loss: z_loss.coef * SCALE**2),
    # W = 0 activates no expert
    ExpertRouterCoupling: (lambda erc: 0.0, collapsed_erc),
    # all experts are parallel
    ExpertOverlap: (lambda overlap: overlap.coef, lambda overlap: overlap.coef),
}


def values_of(strategy: Balancing) -> tuple[float, float] | None:
    """The loss of one layer, uniform and collapsed; zeros without a loss, None for classes that `VALUES` lacks."""
    if not strategy.properties.differentiable:
        return 0.0, 0.0
    known = next((kind for kind in type(strategy).__mro__ if kind in VALUES), None)
    return (VALUES[known][0](strategy), VALUES[known][1](strategy)) if known else None


def its_values_are_worked_out_by_hand(case: Case) -> None:
    strategy = case.make()
    if strategy.coef:
        strategy.coef = 1.0  # some default coefficients are so small that all values are about 0
    if (values := values_of(strategy)) is None:
        return
    turn = torch.arange(24)[:, None] + torch.arange(K)  # every expert is chosen equally often
    nudge_NE = torch.zeros(24, E, dtype=torch.float64).scatter_(1, turn % E, 1e-9)
    collapsed_NE = nudge_NE + SCALE * torch.tensor([1.0] + [-1.0] * (E - 1), dtype=torch.float64)
    rows_ED = torch.zeros(E, D, dtype=torch.float64)
    parallel_ED = rows_ED.clone()
    parallel_ED[:, 0] = collapsed_NE[0].sign() * SCALE
    rising_E = torch.arange(1.0, E + 1, dtype=torch.float64)
    experts = ExpertWeights(rising_E[:, None, None, None].expand(E, 2, 1, D), rising_E[:, None, None].expand(E, 1, D))
    for logits_NE, weight_ED, expected in (
        (nudge_NE, rows_ED, values[0]),
        (collapsed_NE, parallel_ED, values[1]),
    ):
        router = Router(E, E, K, case.gating, case.renormalize, layer=0).double()
        torch.nn.init.eye_(router.weight_ED)
        routing = replace(router(logits_NE, TOKENS_BS), router_weight_ED=weight_ED, experts=experts)
        for value in losses(strategy, [routing, routing]):
            torch.testing.assert_close(value, torch.tensor(expected, dtype=value.dtype), rtol=1e-5, atol=1e-6)

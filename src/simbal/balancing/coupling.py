"""Expert-router coupling (ERC): each router row, as a proxy for its tokens, must activate its own expert the most.

Reference: Lv et al. 2025 (arXiv 2512.23447), equations 3 and 4 and figure 8.
Shapes: L MoE layers, E experts, D model width, F width of an expert.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.balancing.bias import sized_for
from simbal.balancing.controls import splitmix64, uniform_numbers
from simbal.config.values import check_nonnegative
from simbal.model.router import Router, Routing


class ExpertRouterCoupling(Balancing):
    """loss = coef / E^2 sum_{i != j} (max(M_ij - a M_ii, 0) + max(M_ji - a M_ii, 0)), M_ij = |G_j (w_i * d_i)|.

    G_j is the gate matrix of expert j. d_i is noise, uniform in [1 - e_i, 1 + e_i] for each coordinate of the router
    row w_i, with e_i = min_j |w_i - w_j| / (2 |w_i|), so that the proxy stays nearest to its own row. The gradient
    reaches W and the gates; the noise is constant.

    The noise is a hash of the seed, the step, the layer and the position in W: the same on every rank, in every
    micro-batch of a step, and after a resume. Permuted experts get different noise, so the loss is not equivariant.
    """

    formula = "coef / E^2 sum_{i != j} (max(M_ij - a M_ii, 0) + max(M_ji - a M_ii, 0)), M_ij = |G_j (w_i * noise)|"
    citation = "arXiv 2512.23447, equations 3 and 4"
    properties = Properties(
        differentiable=True, scope="weights", causal=True, revives_dead_experts=False, equivariant=False
    )
    needs_experts = True

    def __init__(
        self, num_layers: int = 0, num_experts: int = 0, seed: int = 0, coef: float = 1.0, alpha: float = 1.0
    ) -> None:
        """Initialize the loss.

        Args:
            num_layers: number of MoE layers; 0: set by `prepare`.
            num_experts: number of experts; 0: set by `prepare`.
            seed: seed of the noise.
            coef: multiplier.
            alpha: a in the formula; a smaller value makes experts more specialized.
        """
        super().__init__()
        self.coef, self.alpha, self.seed = check_nonnegative("coef", coef), check_nonnegative("alpha", alpha), seed
        # e at this step's weights
        self.spread_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=torch.float32))
        self.step: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def prepare(self, routers: Sequence[Router]) -> None:
        """Compute the spread of the initial rows.

        Raises:
            UserError: the strategy was created for another model.
        """
        self.spread_LE = sized_for(routers, self.spread_LE)
        self._measure_spread([router.weight_ED for router in routers])

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,)."""
        layers = []
        for layer, routing in enumerate(routings):
            assert routing.experts is not None, "ExpertRouterCoupling needs a simbal model"
            gate_EFD, noise_ED = routing.experts.w13_E2FD[:, 0], self._noise(routing, layer)
            layers.append(excess(activations(routing.router_weight_ED, gate_EFD, noise_ED), self.alpha))
        return self.coef * torch.stack(layers)

    def _noise(self, routing: Routing, layer: int) -> Tensor:
        """Return the noise factors of the router's weight, (E, D)."""
        num_experts, d_model = routing.router_weight_ED.shape
        keys_D = splitmix64(torch.arange(d_model, device=self.step.device)) + splitmix64(self.step + 1)
        centered_ED = 2 * uniform_numbers(keys_D, num_experts, self.seed, layer).T - 1
        return 1 + self.spread_LE[layer, :, None] * centered_ED.to(self.spread_LE.dtype)

    def update(self, step: FinishedStep) -> None:
        """Count the step and compute the spread of the updated rows."""
        self.step.add_(1)
        self._measure_spread(step.router_weights)

    def _measure_spread(self, weights: Sequence[Tensor]) -> None:
        for spread_E, weight_ED in zip(self.spread_LE, weights, strict=True):
            spread_E.copy_(spread(weight_ED))


def spread(weight_ED: Tensor) -> Tensor:
    """Return half the distance of each row to the nearest other row, relative to its length, (E,).

    It is 0 for a row of zeros and for a single row.
    """
    rows_ED = weight_ED.to(torch.promote_types(weight_ED.dtype, torch.float32))
    # without a matrix product, which would lose small distances to rounding
    distance_EE = torch.cdist(rows_ED, rows_ED, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    relative_E: Tensor = distance_EE.amin(1) / (2 * torch.linalg.vector_norm(rows_ED, dim=1))
    return relative_E.nan_to_num(0, posinf=0)


def activations(weight_ED: Tensor, gate_EFD: Tensor, noise_ED: Tensor) -> Tensor:
    """Return M, (E, E): the length of gate j's output for row i times its noise, in at least fp32."""
    wide = torch.promote_types(weight_ED.dtype, torch.float32)
    with torch.autocast(weight_ED.device.type, enabled=False):
        proxy_ED = weight_ED.to(wide) * noise_ED.to(wide)
        hidden_EEF = F.linear(proxy_ED, gate_EFD.to(wide).flatten(0, 1)).view(-1, *gate_EFD.shape[:2])
        length_EE: Tensor = torch.linalg.vector_norm(hidden_EEF, dim=2)
        return length_EE


def excess(activation_EE: Tensor, alpha: float) -> Tensor:
    """Return the mean over all E^2 pairs of the excess over `alpha` M_ii in row i and in column i, a scalar."""
    bound_E = alpha * activation_EE.diagonal()
    over_EE = (activation_EE - bound_E[:, None]).relu() + (activation_EE - bound_E).relu()
    diagonal_EE = torch.eye(len(bound_E), dtype=torch.bool, device=over_EE.device)
    return over_EE.masked_fill(diagonal_EE, 0).mean()

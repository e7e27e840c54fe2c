"""A bias on the choice of experts: what loss-free balancing and the other controllers of a bias share.

Reference: Wang et al. 2024 (arXiv 2408.15664, bias on the gated scores); arXiv 2506.14038, appendix (bias on the
logits).
Shapes: N tokens, L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import one_of
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing


class ChoiceBias(Balancing):
    """choice = top K of s + b, where s is logits or gated scores; a subclass moves b after each optimizer step.

    The bias of a step depends on earlier steps only; it picks experts and never weighs them.
    """

    properties = Properties(differentiable=False, scope="global", causal=True, revives_dead_experts=True)

    def __init__(self, num_layers: int, num_experts: int, bias_on: str, dtype: torch.dtype = torch.float32) -> None:
        """Begin at b = 0; with `num_layers` and `num_experts` of 0, `prepare` takes those of its routers.

        Args:
            num_layers: L of the model.
            num_experts: E of the model.
            bias_on: logits or scores, after the gating.
            dtype: of the bias.
        """
        super().__init__()
        self.bias_on = one_of("bias_on", bias_on, ("logits", "scores"))
        self.bias_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=dtype))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Make the bias, one number for each layer and expert; `UserError` if it was made for another model."""
        self.bias_LE = layer_bias(self.bias_LE, routers)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return logits or gated scores plus the layer's bias, (N, E)."""
        scores_NE = candidates.logits_NE if self.bias_on == "logits" else candidates.probs_NE
        return scores_NE + self.bias_LE[candidates.layer]

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the number of tokens of each expert, (L, E).

        Raises:
            UserError: all scores of a token are 0 (sigmoids of logits below -100), so the bias alone would choose.
        """
        if self.bias_on == "scores" and any((routing.probs_NE.sum(-1) == 0).any() for routing in routings):
            raise UserError(
                "all scores of a token are zero, so that the bias alone chooses its experts: the router's logits have "
                "fallen below -100; use bias_on=logits or a smaller optim.lr"
            )
        return super().measure(routings)


def layer_bias(bias_LE: Tensor, routers: Sequence[Router]) -> Tensor:
    """Return `bias_LE` itself if it fits the routers; zeros that do, of its dtype, if it has no elements.

    Raises:
        UserError: it was made for another model.
    """
    shape = (len(routers), len(routers[0].weight_ED)) if routers else tuple(bias_LE.shape)
    if not bias_LE.numel():
        return torch.zeros(shape, dtype=bias_LE.dtype, device=bias_LE.device)
    if tuple(bias_LE.shape) != shape:
        made, model = (f"num_layers={layers} and num_experts={experts}" for layers, experts in (bias_LE.shape, shape))
        raise UserError(f"the strategy was made for {made}, but the model has {model}")
    return bias_LE

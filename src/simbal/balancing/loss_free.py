"""Loss-free balancing: a bias on the choice of experts follows the load, and no gradient is disturbed.

Reference: Wang et al. 2024 (arXiv 2408.15664, bias on the gated scores); arXiv 2506.14038, appendix (bias on the
logits); centred steps as in torchtitan.
Shapes: N tokens, L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.config.values import not_negative, one_of
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing

BIAS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LossFree(Balancing):
    """choice = top K of logits + b; after each optimizer step b_i += update_rate * sign(1/E - f_i).

    f_i is the share of all choices in that step which fell on expert i (sums to 1, unlike that of the load balancing
    loss). The bias of a step depends on earlier steps only; it picks experts and never weighs them.
    """

    citation = "arXiv 2408.15664; arXiv 2506.14038, appendix"
    properties = Properties(differentiable=False, scope="global", causal=True, revives_dead_experts=True)

    def __init__(
        self,
        num_layers: int = 0,
        num_experts: int = 0,
        update_rate: float = 0.001,
        bias_on: str = "logits",
        center: bool = False,
        bias_dtype: str = "fp32",
    ) -> None:
        """Set the rule; without `num_layers` and `num_experts`, `prepare` takes those of its routers.

        Args:
            num_layers: L of the model.
            num_experts: E of the model.
            update_rate: the step, in units of a logit, or of a score between 0 and 1.
            bias_on: logits (arXiv 2506.14038) or scores, after the gating (arXiv 2408.15664).
            center: subtract each update's mean over the experts.
            bias_dtype: fp32; bf16 only to study how it stalls, at 0.5 for steps of 0.001.
        """
        super().__init__()
        self.update_rate = not_negative("update_rate", update_rate)
        self.bias_on, self.center = one_of("bias_on", bias_on, ("logits", "scores")), center
        dtype = BIAS_DTYPES[one_of("bias_dtype", bias_dtype, [*BIAS_DTYPES])]
        self.bias_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=dtype))
        step = "(step_i - mean step)" if center else "step_i"
        self.formula = (
            f"no loss; choice by {bias_on} + b, step_i = sign(1/E - f_i), b_i += update_rate * {step} after each "
            f"optimizer step; sum_i f_i = 1"
        )

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
                "fallen below -100; use balancing.lf.bias_on=logits or a smaller optim.lr"
            )
        return super().measure(routings)

    def update(self, step: FinishedStep) -> None:
        """Move the bias towards an even load."""
        counts_LE = step.measured_LE  # whole numbers: an exactly even load moves nothing, as sign(0) = 0
        sign_LE = (counts_LE.sum(1, keepdim=True) - counts_LE.shape[1] * counts_LE).sign().float()
        if self.center:
            sign_LE -= sign_LE.mean(1, keepdim=True)
        self.bias_LE.add_(sign_LE, alpha=self.update_rate * step.factor)


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

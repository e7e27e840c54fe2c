"""Loss-free balancing: a bias on the choice of experts follows the load, and no gradient is disturbed.

Reference: Wang et al. 2024 (arXiv 2408.15664, bias on the gated scores); arXiv 2506.14038, appendix (bias on the
logits); centred steps as in torchtitan.
Shapes: L MoE layers, E experts.
"""

import torch

from simbal.balancing.base import FinishedStep
from simbal.balancing.choice_bias import ChoiceBias
from simbal.config.values import not_negative, one_of

BIAS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LossFree(ChoiceBias):
    """choice = top K of logits + b; after each optimizer step b_i += update_rate * sign(1/E - f_i).

    f_i is the share of all choices in that step which fell on expert i (sums to 1, unlike that of the load balancing
    loss). The bias of a step depends on earlier steps only; it picks experts and never weighs them.
    """

    citation = "arXiv 2408.15664; arXiv 2506.14038, appendix"

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
        dtype = BIAS_DTYPES[one_of("bias_dtype", bias_dtype, [*BIAS_DTYPES])]
        super().__init__(num_layers, num_experts, bias_on, dtype)
        self.update_rate, self.center = not_negative("update_rate", update_rate), center
        step = "(step_i - mean step)" if center else "step_i"
        self.formula = (
            f"no loss; choice by {bias_on} + b, step_i = sign(1/E - f_i), b_i += update_rate * {step} after each "
            f"optimizer step; sum_i f_i = 1"
        )

    def update(self, step: FinishedStep) -> None:
        """Move the bias towards an even load."""
        counts_LE = step.measured_LE  # whole numbers: an exactly even load moves nothing, as sign(0) = 0
        sign_LE = (counts_LE.sum(1, keepdim=True) - counts_LE.shape[1] * counts_LE).sign().float()
        if self.center:
            sign_LE -= sign_LE.mean(1, keepdim=True)
        self.bias_LE.add_(sign_LE, alpha=self.update_rate * step.factor)

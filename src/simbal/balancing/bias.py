"""Loss-free balancing and related controllers: the load of each expert adjusts its bias in the choice of experts.

Reference: Wang et al. 2024 (arXiv 2408.15664, bias on the gated scores); arXiv 2506.14038, appendix (bias on the
logits); centered steps: torchtitan; SMEBU: Trinity Large (arXiv 2602.17004); LongCat-Flash (arXiv 2509.01322); groups
of experts: DeepSeek-V3 (arXiv 2412.19437). The PI controller is our own.
Shapes: N tokens, L MoE layers, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from simbal.balancing.base import DTYPES, Balancing, FinishedStep, Properties
from simbal.config.values import check_choice, check_fraction, check_integer, check_nonnegative, check_positive
from simbal.errors import UserError
from simbal.model.router import Candidates, Groups, Router

ERRORS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sign": ("sign(v_i)", torch.sign),
    "linear": ("kappa v_i", lambda scaled_LE: scaled_LE),
    "clip": ("clip(kappa v_i, -1, 1)", lambda scaled_LE: scaled_LE.clamp(-1, 1)),
    "tanh": ("tanh(kappa v_i)", torch.tanh),
}


class ChoiceBias(Balancing):
    """choice = top K of s + b, where s is logits or gated scores; a subclass updates b after each optimizer step.

    The bias of a step depends only on earlier steps. It affects the choice of experts but not their weights.
    """

    properties = Properties(differentiable=False, scope="global", causal=True, revives_dead_experts=True)

    def __init__(self, num_layers: int, num_experts: int, bias_on: str, dtype: torch.dtype = torch.float32) -> None:
        """Initialize b = 0.

        Args:
            num_layers: number of MoE layers; 0: set by `prepare`.
            num_experts: number of experts; 0: set by `prepare`.
            bias_on: logits, or scores after the gating.
            dtype: dtype of the bias.
        """
        super().__init__()
        self.bias_on = check_choice("bias_on", bias_on, ("logits", "scores"))
        self.bias_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=dtype))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Create the bias with one value per layer and expert.

        Raises:
            UserError: the bias was created for another model.
        """
        self.bias_LE = sized_for(routers, self.bias_LE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return logits or gated scores plus the layer's bias, (N, E)."""
        scores_NE = candidates.logits_NE if self.bias_on == "logits" else candidates.probs_NE
        return scores_NE + self.bias_LE[candidates.layer]


def sized_for(routers: Sequence[Router], state_LE: Tensor) -> Tensor:
    """Return `state_LE` if it has one value per layer and expert of the routers, or zeros if it is empty.

    Raises:
        UserError: `state_LE` was created for another model.
    """
    shape = (len(routers), len(routers[0].weight_ED)) if routers else tuple(state_LE.shape)
    if not state_LE.numel():
        return torch.zeros(shape, dtype=state_LE.dtype, device=state_LE.device)
    if tuple(state_LE.shape) != shape:
        ours, model = (f"num_layers={layers} and num_experts={experts}" for layers, experts in (state_LE.shape, shape))
        raise UserError(f"the strategy was created for {ours}, but the model has {model}")
    return state_LE


class LossFree(ChoiceBias):
    """choice = top K of logits + b; after each optimizer step b_i += update_rate * sign(1/E - f_i).

    f_i is expert i's fraction of all choices in that step; it sums to 1, unlike f of the load-balancing loss. The bias
    of a step depends only on earlier steps. It affects the choice of experts but not their weights.
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
        """Initialize b = 0.

        Args:
            num_layers: number of MoE layers; 0: set by `prepare`.
            num_experts: number of experts; 0: set by `prepare`.
            update_rate: size of an update, in units of the logits or of the scores.
            bias_on: logits (arXiv 2506.14038), or scores after the gating (arXiv 2408.15664).
            center: subtract each update's mean over the experts.
            bias_dtype: fp32; bf16 is only for studying rounding (with updates of 0.001, the bias stalls at 0.5).
        """
        dtype = DTYPES[check_choice("bias_dtype", bias_dtype, [*DTYPES])]
        super().__init__(num_layers, num_experts, bias_on, dtype)
        self.update_rate, self.center = check_nonnegative("update_rate", update_rate), center
        step = "(step_i - mean step)" if center else "step_i"
        self.formula = (
            f"no loss; choice by {bias_on} + b, step_i = sign(1/E - f_i), b_i += update_rate * {step} after each "
            f"optimizer step; sum_i f_i = 1"
        )

    def update(self, step: FinishedStep) -> None:
        """Move the bias toward an even load."""
        counts_LE = step.measured_LE  # integers: an exactly even load changes nothing, as sign(0) = 0
        sign_LE = (counts_LE.sum(1, keepdim=True) - counts_LE.shape[1] * counts_LE).sign().float()
        if self.center:
            sign_LE -= sign_LE.mean(1, keepdim=True)
        self.bias_LE.add_(sign_LE, alpha=self.update_rate * step.factor)


class BiasController(ChoiceBias):
    """choice = top K of s + b; after each optimizer step b_i += update_rate m_i + proportional (m_i - last m_i).

    v_i = 1 - E f_i is the load deficit of expert i relative to the mean load, where f_i is expert i's fraction of all
    choices in that step. The error e_i is a function of kappa v_i, and m_i = momentum m_i + (1 - momentum) e_i. Without
    a schedule this is a PI controller: b = proportional times m plus update_rate times the sum of all m so far.
    """

    citation = "arXiv 2408.15664; arXiv 2602.17004; arXiv 2509.01322; groups: arXiv 2412.19437"

    def __init__(
        self,
        num_layers: int = 0,
        num_experts: int = 0,
        update_rate: float = 0.01,
        bias_on: str = "logits",
        error: str = "clip",
        kappa: float = 1.0,
        center: bool = False,
        momentum: float = 0.0,
        proportional: float = 0.0,
        groups: int = 1,
        group_top_k: int = 1,
    ) -> None:
        """Initialize the bias and the error to 0.

        Args:
            num_layers: number of MoE layers; 0: set by `prepare`.
            num_experts: number of experts; 0: set by `prepare`.
            update_rate: size of an update at error 1, in units of the logits or of the scores.
            bias_on: logits, or scores after the gating.
            error: sign (arXiv 2408.15664), linear (arXiv 2509.01322), clip (linear within [-1, 1]) or tanh (SMEBU).
            kappa: gain of v in the error; no effect with error=sign.
            center: subtract the error's mean over the experts.
            momentum: fraction of the previous error that is kept, in [0, 1).
            proportional: proportional gain of the error, in the same units as `update_rate`.
            groups: number of groups of consecutive experts; 1: no restriction.
            group_top_k: number of groups per token; groups are ranked by the sum of their two highest scores.

        Raises:
            UserError: an argument has an invalid value.
        """
        super().__init__(num_layers, num_experts, bias_on)
        self.update_rate = check_nonnegative("update_rate", update_rate)
        self.proportional = check_nonnegative("proportional", proportional)
        self.error, self.kappa = check_choice("error", error, [*ERRORS]), check_positive("kappa", kappa)
        self.center, self.momentum = center, check_fraction("momentum", momentum)
        check_integer("groups", groups, least=1)
        check_integer("group_top_k", group_top_k, least=1)
        if group_top_k > groups:
            raise UserError(f"group_top_k={group_top_k} must be at most groups={groups}")
        self.groups = Groups(groups, group_top_k, "best two")
        self.error_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts, dtype=torch.float32))
        # groups depend on the order of the experts
        self.properties = replace(type(self).properties, equivariant=group_top_k == groups)
        self.formula = self._formula()

    def _formula(self) -> str:
        """Return the equations with these settings."""
        chosen, count = self.groups.chosen, self.groups.count
        within = "" if chosen == count else f" in the {chosen} of {count} groups with the best two experts"
        error = ERRORS[self.error][0] + (" minus its mean" if self.center else "")
        smoothed = f"m_i = {self.momentum} m_i + {1 - self.momentum:g} e_i" if self.momentum else "m_i = e_i"
        position = " + proportional * (change of m_i)" if self.proportional else ""
        return (
            f"no loss; choice by {self.bias_on} + b{within}, v_i = 1 - E f_i, e_i = {error}, {smoothed}, "
            f"b_i += update_rate * m_i{position} after each optimizer step; sum_i f_i = 1"
        )

    def prepare(self, routers: Sequence[Router]) -> None:
        """Create the bias and the error with one value per layer and expert.

        Raises:
            UserError: they were created for another model, or the groups do not fit the model.
        """
        super().prepare(routers)
        self.error_LE = sized_for(routers, self.error_LE)
        groups = self.groups
        for router in routers:
            num_experts = len(router.weight_ED)
            if num_experts % groups.count:
                raise UserError(f"groups={groups.count} must divide model.num_experts={num_experts}")
            eligible = self.choosable(num_experts, router.top_k)
            if eligible < router.top_k:
                raise UserError(
                    f"group_top_k={groups.chosen} leaves a token {eligible} experts, fewer than "
                    f"model.top_k={router.top_k}"
                )

    def choosable(self, num_experts: int, top_k: int) -> int:
        """Return the number of experts in a token's groups."""
        return num_experts * self.groups.chosen // self.groups.count

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return logits or gated scores plus the layer's bias, (N, E), with -inf outside of a token's groups."""
        return self.groups.limited(super().choice_scores(candidates))

    def update(self, step: FinishedStep) -> None:
        """Move the bias toward an even load."""
        error_LE = ERRORS[self.error][1](self.kappa * load_deficit(step.measured_LE))
        if self.center:
            error_LE = error_LE - error_LE.mean(1, keepdim=True)
        last_LE = self.error_LE.clone()
        self.error_LE.lerp_(error_LE, 1 - self.momentum)
        self.bias_LE.add_(self.error_LE, alpha=self.update_rate * step.factor)
        self.bias_LE.add_(self.error_LE - last_LE, alpha=self.proportional * step.factor)


def load_deficit(counts_LE: Tensor) -> Tensor:
    """Return v_i = 1 - E f_i = (mean count - count_i) / mean count, (L, E), in fp32; its minimum is -MaxVio.

    The numerator is an integer, so v is exactly 0 at an exactly even load. It is also 0 without tokens.
    """
    total_L1 = counts_LE.sum(1, keepdim=True)
    return (total_L1 - counts_LE.shape[1] * counts_LE).float() / total_L1.clamp(min=1)

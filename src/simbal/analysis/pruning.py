"""The analysis `pruning`: the loss and the time of a run when experts of small weight are not computed.

Reference: dynamic-k pruning, arXiv 2506.14038, section 4.4 and table 6.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, K experts per token, D model width, G documents.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from simbal.analysis.quality import document_sums
from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Pruned, Subject, UnsuitedError, check_pass
from simbal.config.values import whole_number
from simbal.errors import UserError
from simbal.experts.backends import RoutingPlan
from simbal.experts.select import apply_experts
from simbal.metrics.definitions import perplexity
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.router import Routing, Steering

Forward = Callable[[Tensor, Tensor, Steering | None], tuple[Tensor, Routing]]

PLAIN = "plain"
DEFINITION = {
    "pruning": "a chosen expert is computed if its weight divided by the sum of the token's weights is at least the "
    "threshold (rule=relative: threshold times the token's largest)",
    "experts_prune_<threshold>": "experts computed for a token, mean over tokens and layers",
    "seconds_prune_<threshold>": "time on a clock of a pass over all tokens, head and loss included; median",
    "time_ratio_prune_<threshold>": "time of a pass by that of plain just before or after it, geometric mean of turns",
    "time_ratio_low_prune_<threshold>": "the lower end of its 95% interval, by Student's t of the logarithms",
    "time_ratio_high_prune_<threshold>": "the upper end of the same interval",
    "loss": "cross-entropy in nats, mean over tokens; no auxiliary loss, no z-loss",
    "ppl_prune_<threshold>": "exp of the loss; plain keeps every expert, by the same code as the others",
}


@dataclass(frozen=True)
class Pruning:
    """The rule for which of a token's chosen experts are computed, by their weights divided by their sum, w.

    Those with w_k >= threshold stay, or with w_k >= threshold * max_k w_k. The kept weights stay what they were, or
    with `renorm_after` are scaled so that their sum stays what it was.
    """

    threshold: float
    rule: str  # absolute | relative
    renorm_after: bool
    allow_none: bool  # a token may lose all its experts; else the one of the largest weight stays

    def kept(self, weights_NK: Tensor) -> Tensor:
        """Return which choices stay, (N, K) bool."""
        sum_N1 = weights_NK.sum(1, keepdim=True)
        shares_NK = weights_NK / sum_N1.where(sum_N1 > 0, 1)  # sigmoids can all be 0
        largest_N1 = shares_NK.amax(1, keepdim=True)
        kept_NK = shares_NK >= (self.threshold * largest_N1 if self.rule == "relative" else self.threshold)
        if self.allow_none:
            return kept_NK
        first_N1 = shares_NK.argmax(1, keepdim=True)
        return kept_NK.scatter(1, first_N1, True)

    def weights(self, weights_NK: Tensor, kept_NK: Tensor) -> Tensor:
        """Return the weights of the experts' outputs, (N, K): 0 for one that is not computed."""
        left_NK = weights_NK.masked_fill(~kept_NK, 0)
        if not self.renorm_after:
            return left_NK
        left_N1 = left_NK.sum(1, keepdim=True)
        return left_NK * (weights_NK.sum(1, keepdim=True) / left_N1.where(left_N1 > 0, 1))


@dataclass
class Arm:
    """One way to go over the tokens; `plain` has threshold 0, and the times of the others are held against it."""

    name: str  # the threshold as text, or `plain`
    pruning: Pruning
    loss: float = 0.0
    experts_L: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # seconds of a pass by those of plain beside it

    @property
    def summary(self) -> dict[str, Any]:
        """The arm's numbers: threshold, loss, ppl, experts per token, seconds (median, min, max) and their ratio."""
        interval = geometric_mean(self.ratios) if self.ratios else (None, None, None)
        return {
            "threshold": None if self.name == PLAIN else self.pruning.threshold,
            "loss": self.loss,
            "ppl": perplexity(self.loss, 1),
            "experts": sum(self.experts_L) / len(self.experts_L),
            "seconds": {"median": median(self.seconds), "min": min(self.seconds), "max": max(self.seconds)},
            "ratio": dict(zip(("mean", "low", "high"), interval, strict=True)),
        }


def geometric_mean(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the geometric mean of positive numbers, and its 95% interval by Student's t of their logarithms.

    One number has no interval.
    """
    from scipy.special import stdtrit  # here, as most analyses do without

    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    half = float(stdtrit(len(logs) - 1, 0.975)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def pruning(
    subject: Subject,
    tokens: int | None,
    batch_size: int,
    thresholds: list[float],
    rule: Literal["absolute", "relative"],
    renorm_after: bool,
    allow_none: bool,
    repeats: int,
) -> Result:
    """Measure perplexity, experts per token and seconds at each threshold.

    Identical work takes a machine 5 to 10% more or less from one minute to the next. So each pass is timed beside one
    that keeps every expert by the same code, in alternating order, and their ratios are what is compared.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; seconds depend on it.
        thresholds: each between 0 and 1.
        rule: what the threshold is held against: the weight, or its share of the token's largest.
        renorm_after: scale the kept weights so that their sum stays what it was.
        allow_none: a token may lose all its experts.
        repeats: turns; each has two passes of every threshold, of which one keeps every expert.

    Raises:
        UserError: the model is dense, or a key is out of its range.
    """
    _check(subject, thresholds, repeats)
    check_pass("pruning", tokens, batch_size)
    prunings = [Pruning(threshold, rule, renorm_after, allow_none) for threshold in sorted(set(thresholds))]
    plain = Arm(PLAIN, replace(prunings[0], threshold=0.0))
    arms = [Arm(f"{each.threshold:g}", each) for each in prunings]
    for arm in (plain, *arms):
        _pass(subject, 1, batch_size, arm)  # whatever is slow once: one window, not timed
        arm.seconds.clear()
    counted = 0
    for turn in range(repeats):
        for place, arm in enumerate(arms):
            for each in (plain, arm) if (turn + place) % 2 == 0 else (arm, plain):
                counted = _pass(subject, tokens, batch_size, each)
            arm.ratios.append(arm.seconds[-1] / plain.seconds[-1])
    arms = [plain, *arms]
    record = {
        "definition": DEFINITION,
        "tokens": counted,
        "metrics": _metrics(arms),
        "arms": {arm.name: arm.summary for arm in arms},
        "layers": {f"experts_{arm.name}": arm.experts_L for arm in arms},
        "backend": subject.backend,
    }
    return Result([_table(arms)], _notes(counted, repeats, rule, renorm_after), record)


def kept_plan(experts_NK: Tensor, weights_NK: Tensor, kept_NK: Tensor, num_experts: int) -> RoutingPlan:
    """Return a plan with rows for the kept choices only, for a forward pass.

    `weights_NK` are 0 where nothing is kept. A slot without a row points at some other's, which its weight 0 takes
    away: backends need no case of their own, and with everything kept the plan is the usual one.
    """
    plan = RoutingPlan.build(experts_NK.masked_fill(~kept_NK, num_experts), weights_NK, num_experts)
    rows = int(plan.ends_E[-1])  # choices that are not kept were sorted behind the last expert
    return RoutingPlan(weights_NK, plan.order_R[:rows], plan.inverse_R.clamp(max=max(rows - 1, 0)), plan.ends_E)


@contextmanager
def pruned(feed_forwards: Sequence[MoELayer | FeedForward], pruning: Pruned) -> Iterator[list[int]]:
    """Make the layers prune within the block; yield how many choices each has kept so far. For inference only."""
    layers = [layer for layer in feed_forwards if isinstance(layer, MoELayer)]
    kept_L = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.forward = _forward(layer, pruning, kept_L, index)  # type: ignore[assignment, method-assign]
    try:
        yield kept_L
    finally:
        for layer in layers:
            del layer.forward  # the class's own is back


def _forward(layer: MoELayer, pruning: Pruned, kept_L: list[int], index: int) -> Forward:
    def forward(x_BSD: Tensor, tokens_BS: Tensor, steering: Steering | None = None) -> tuple[Tensor, Routing]:
        x_ND = x_BSD.flatten(0, 1)
        routing = layer.router(x_ND, tokens_BS, steering)
        kept_NK = pruning.kept(routing.topk_probs_NK)
        weights_NK = pruning.weights(routing.topk_probs_NK, kept_NK)
        plan = kept_plan(routing.topk_experts_NK, weights_NK, kept_NK, len(layer.w2_EFD))
        kept_L[index] += len(plan.order_R)
        if not len(plan.order_R):
            return layer.with_shared(torch.zeros_like(x_BSD), x_BSD), routing
        y_ND = apply_experts(layer.backend, x_ND, plan, layer.w13_E2FD, layer.w2_EFD, layer.biases)
        return layer.with_shared(y_ND.view_as(x_BSD), x_BSD), routing

    return forward


def _pass(subject: Subject, tokens: int | None, batch_size: int, arm: Arm) -> int:
    """Fill in the arm's numbers from one pass, and return how many tokens it was."""
    cuda = subject.device.type == "cuda"
    with subject.pruned(arm.pruning) as kept_L:
        started = time.perf_counter()
        sums_G3 = document_sums(subject, tokens, batch_size, title=f"pruning: {arm.name}")
        if cuda:
            torch.cuda.synchronize(subject.device)
        arm.seconds.append(time.perf_counter() - started)
    nats, counted = sums_G3.sum(0)[0].item(), int(sums_G3[:, 1].sum())
    arm.loss = nats / counted
    arm.experts_L = [kept / counted for kept in kept_L]
    return counted


def _metrics(arms: list[Arm]) -> dict[str, float]:
    metrics = {}
    for arm in arms:
        numbers = arm.summary
        metrics[f"ppl_prune_{arm.name}"] = numbers["ppl"]
        metrics[f"experts_prune_{arm.name}"] = numbers["experts"]
        metrics[f"seconds_prune_{arm.name}"] = numbers["seconds"]["median"]
        if arm.name != PLAIN:
            mean, low, high = numbers["ratio"].values()
            metrics[f"time_ratio_prune_{arm.name}"] = mean
            if low is not None:
                metrics[f"time_ratio_low_prune_{arm.name}"] = low
                metrics[f"time_ratio_high_prune_{arm.name}"] = high
    return metrics


def _check(subject: Subject, thresholds: list[float], repeats: int) -> None:
    if not subject.num_experts:
        raise UnsuitedError(f"analysis.pruning prunes experts, and {subject.path} has none: its model is dense")
    if not (thresholds and all(0 <= threshold <= 1 for threshold in thresholds)):
        raise UserError(f"analysis.pruning.thresholds={thresholds} must be a list of numbers between 0 and 1")
    whole_number("analysis.pruning.repeats", repeats, 1)


def _notes(counted: int, repeats: int, rule: str, renorm_after: bool) -> list[str]:
    said = [
        f"{counted:,} tokens, {repeats} turns; rule={rule}, renorm_after={renorm_after}. / plain: time by that of a "
        "pass beside it that keeps every expert by the same code, with its 95% interval over turns; below the noise: "
        "the interval contains 1."
    ]
    if repeats < 2:
        said.append("One turn tells nothing of the noise: analysis.pruning.repeats=2 or more gives an interval.")
    return said


def _table(arms: list[Arm]) -> Table:
    headings = ("threshold", "loss", "ppl", "experts", "seconds", "/ plain", "95% interval", "")
    rows = []
    for arm in arms:
        numbers = arm.summary
        rows.append([
            arm.name, f"{numbers['loss']:.4f}", f"{numbers['ppl']:,.3f}", f"{numbers['experts']:.3f}",
            f"{numbers['seconds']['median']:.3f}", *_ratio_cells(**numbers["ratio"]),
        ])  # fmt: skip
    return numbers_table("experts of small weight are not computed", headings, rows, texts=0)


def _ratio_cells(mean: float | None, low: float | None, high: float | None) -> tuple[str, str, str]:
    if mean is None:
        return "", "", ""
    if low is None or high is None:
        return f"{mean:.3f}", "", ""
    return f"{mean:.3f}", f"{low:.3f} to {high:.3f}", "below the noise" if low <= 1 <= high else ""

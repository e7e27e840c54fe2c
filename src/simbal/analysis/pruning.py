"""The analysis `pruning`: loss and time when chosen experts with small weights are not computed.

Reference: dynamic-k pruning, arXiv 2506.14038, section 4.4 and table 6.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, K experts per token, R computed rows, D model
width, G documents.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median, stdev
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from simbal.analysis.quality import document_sums
from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Pruned, Subject, require_routers
from simbal.experts.backends import RoutingPlan
from simbal.experts.select import apply_experts
from simbal.metrics.definitions import perplexity
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.router import Routing, Steering

PLAIN = "plain"
DEFINITION = {
    "pruning": "a chosen expert is computed if its weight divided by the sum of the token's weights is at least the "
    "threshold (rule=relative: threshold times the token's largest weight)",
    "experts_prune_<threshold>": "experts computed per token, mean over tokens and layers",
    "seconds_prune_<threshold>": "wall time of a pass over all tokens, including head and loss; median",
    "time_ratio_prune_<threshold>": "time of a pass divided by the time of the adjacent plain pass, geometric mean",
    "time_ratio_low_prune_<threshold>": "lower end of the ratio's 95% interval, from Student's t of the logarithms",
    "time_ratio_high_prune_<threshold>": "upper end of the same interval",
    "loss": "cross-entropy in nats, mean over tokens; no auxiliary loss, no z-loss",
    "ppl_prune_<threshold>": "exp of the loss; plain computes every chosen expert with the same code",
}


@dataclass(frozen=True)
class Pruning:
    """The rule that decides which chosen experts are computed, from the gate weights w divided by the token's sum.

    Experts with w_k >= threshold are kept (rule `absolute`), or with w_k >= threshold * max_k w_k (rule `relative`).
    With `renorm_after` the kept weights are rescaled to the sum before pruning.
    """

    threshold: float
    rule: str  # absolute | relative
    renorm_after: bool
    allow_none: bool  # whether a token may lose all its experts; otherwise it keeps the one with the largest weight

    def kept(self, weights_NK: Tensor) -> Tensor:
        """Return a mask of the chosen experts to compute, (N, K) bool."""
        sum_N1 = weights_NK.sum(1, keepdim=True)
        shares_NK = weights_NK / sum_N1.where(sum_N1 > 0, 1)  # sigmoids can all be 0
        largest_N1 = shares_NK.amax(1, keepdim=True)
        kept_NK = shares_NK >= (self.threshold * largest_N1 if self.rule == "relative" else self.threshold)
        if self.allow_none:
            return kept_NK
        first_N1 = shares_NK.argmax(1, keepdim=True)
        return kept_NK.scatter(1, first_N1, True)

    def weights(self, weights_NK: Tensor, kept_NK: Tensor) -> Tensor:
        """Return the gate weights, (N, K), with 0 for experts that are not computed."""
        masked_NK = weights_NK.masked_fill(~kept_NK, 0)
        if not self.renorm_after:
            return masked_NK
        masked_N1 = masked_NK.sum(1, keepdim=True)
        return masked_NK * (weights_NK.sum(1, keepdim=True) / masked_N1.where(masked_N1 > 0, 1))


@dataclass
class Arm:
    """The measurements of one threshold, or of `plain` (threshold 0), with which the others are compared."""

    name: str  # the threshold, or `plain`
    pruning: Pruning
    tokens: int = 0
    loss: float = 0.0
    experts_L: list[float] = field(default_factory=list)  # computed experts per token, by layer
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # seconds divided by the seconds of the adjacent plain pass

    @property
    def summary(self) -> dict[str, Any]:
        """The threshold, loss, perplexity, experts per token, seconds and ratio of times."""
        mean, low, high = geometric_mean(self.ratios) if self.ratios else (None, None, None)
        return {
            "threshold": None if self.name == PLAIN else self.pruning.threshold,
            "loss": self.loss,
            "ppl": perplexity(self.loss, 1),
            "experts": sum(self.experts_L) / len(self.experts_L),
            "seconds": {"median": median(self.seconds), "min": min(self.seconds), "max": max(self.seconds)},
            "ratio": {"mean": mean, "low": low, "high": high},
        }


def geometric_mean(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the geometric mean and its 95% interval (None for one ratio), from Student's t of the logarithms."""
    from scipy.special import stdtrit  # slow to import, and no other analysis needs it

    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    half = float(stdtrit(len(logs) - 1, 0.975)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def pruning(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    thresholds: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)],
    rule: Literal["absolute", "relative"],
    renorm_after: bool,
    allow_none: bool,
    repeats: PositiveInt,
) -> Result:
    """Measure perplexity, experts per token and time at each threshold.

    A machine's speed varies by 5 to 10% from minute to minute, so each pass is timed next to a plain pass, in
    alternating order, and the ratio of the two times is reported.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; affects the times only.
        thresholds: thresholds of the gate weights.
        rule: whether a threshold applies to the weight itself, or to its ratio to the token's largest weight.
        renorm_after: whether the kept weights are rescaled to the sum before pruning.
        allow_none: whether a token may lose all its experts.
        repeats: timed passes of each threshold, each paired with a plain pass.

    Raises:
        NotApplicableError: the model is dense.
    """
    require_routers(subject, "pruning")
    prunings = [Pruning(threshold, rule, renorm_after, allow_none) for threshold in sorted(set(thresholds))]
    plain = Arm(PLAIN, replace(prunings[0], threshold=0.0))
    arms = [Arm(f"{each.threshold:g}", each) for each in prunings]
    for arm in (plain, *arms):
        run_pass(subject, 1, batch_size, arm)  # warm up on one window
        arm.seconds.clear()
    for turn in range(repeats):
        for index, arm in enumerate(arms):
            for each in (plain, arm) if (turn + index) % 2 == 0 else (arm, plain):
                run_pass(subject, tokens, batch_size, each)
            arm.ratios.append(arm.seconds[-1] / plain.seconds[-1])
    arms = [plain, *arms]
    summaries = {arm.name: arm.summary for arm in arms}
    record = {
        "definition": DEFINITION,
        "tokens": plain.tokens,
        "metrics": _metrics(summaries),
        "arms": summaries,
        "layers": {f"experts_{arm.name}": arm.experts_L for arm in arms},
        "backend": subject.backend,
    }
    notes = [
        f"{plain.tokens:,} tokens, {repeats} repeats; rule={rule}, renorm_after={renorm_after}. / plain: time divided "
        "by the time of an adjacent pass that computes every chosen expert, with a 95% interval; below the noise: the "
        "interval contains 1."
    ]
    if repeats < 2:
        notes.append("One repeat gives no interval: set analysis.pruning.repeats=2 or more.")
    headings = ("threshold", "loss", "ppl", "experts", "seconds", "/ plain", "95% interval", "")
    rows = [_row(name, numbers) for name, numbers in summaries.items()]
    table = numbers_table("experts with small weights are not computed", headings, rows, texts=0)
    return Result([table], notes, record)


def run_pass(subject: Subject, tokens: int | None, batch_size: int, arm: Arm) -> None:
    """Measure one pass over the tokens, and add it to the arm."""
    with subject.pruned(arm.pruning) as kept_L:
        start = time.perf_counter()
        sums_G3 = document_sums(subject, tokens, batch_size, title=f"pruning: {arm.name}")
        if subject.device.type == "cuda":
            torch.cuda.synchronize(subject.device)
        arm.seconds.append(time.perf_counter() - start)
    nats, counted, _ = sums_G3.sum(0).tolist()
    arm.tokens, arm.loss = int(counted), nats / counted
    arm.experts_L = [kept / counted for kept in kept_L]


def kept_plan(experts_NK: Tensor, weights_NK: Tensor, kept_NK: Tensor, num_experts: int) -> RoutingPlan:
    """Return a plan for a forward pass with rows for the kept choices only. `weights_NK` is 0 for all other choices.

    A choice without a row points to an arbitrary row with weight 0, so backends need no special case.
    """
    plan = RoutingPlan.build(experts_NK.masked_fill(~kept_NK, num_experts), weights_NK, num_experts)
    rows = int(plan.ends_E[-1])  # choices that are not kept are sorted behind the last expert
    return RoutingPlan(weights_NK, plan.order_R[:rows], plan.inverse_R.clamp(max=max(rows - 1, 0)), plan.ends_E)


@contextmanager
def pruned(feed_forwards: Sequence[MoELayer | FeedForward], pruning: Pruned) -> Iterator[list[int]]:
    """Prune experts within the block, for inference only; yield the (token, expert) pairs computed so far by layer."""
    layers = [layer for layer in feed_forwards if isinstance(layer, MoELayer)]
    kept_L = [0] * len(layers)

    def forward(
        index: int, x_BSD: Tensor, tokens_BS: Tensor, steering: Steering | None, router_input_BSD: Tensor
    ) -> tuple[Tensor, Routing]:
        layer, x_ND = layers[index], x_BSD.flatten(0, 1)
        routing = layer.router(router_input_BSD.flatten(0, 1), tokens_BS, steering)
        kept_NK = pruning.kept(routing.topk_probs_NK)
        weights_NK = pruning.weights(routing.topk_probs_NK, kept_NK)
        plan = kept_plan(routing.topk_experts_NK, weights_NK, kept_NK, len(layer.w2_EFD))
        kept_L[index] += len(plan.order_R)
        if not len(plan.order_R):
            return layer.with_shared(torch.zeros_like(x_BSD), x_BSD), routing
        y_ND = apply_experts(layer.backend, x_ND, plan, layer.w13_E2FD, layer.w2_EFD, layer.biases)
        return layer.with_shared(y_ND.view_as(x_BSD), x_BSD), routing

    for index, layer in enumerate(layers):
        layer.forward = partial(forward, index)  # type: ignore[method-assign]
    try:
        yield kept_L
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class


def _metrics(summaries: dict[str, dict[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, numbers in summaries.items():
        mean, low, high = numbers["ratio"].values()
        values = {
            "ppl": numbers["ppl"], "experts": numbers["experts"], "seconds": numbers["seconds"]["median"],
            "time_ratio": mean, "time_ratio_low": low, "time_ratio_high": high,
        }  # fmt: skip
        metrics |= {f"{key}_prune_{name}": value for key, value in values.items() if value is not None}
    return metrics


def _row(name: str, numbers: dict[str, Any]) -> list[str]:
    mean, low, high = numbers["ratio"].values()
    loss, ppl, experts = f"{numbers['loss']:.4f}", f"{numbers['ppl']:,.3f}", f"{numbers['experts']:.3f}"
    row = [name, loss, ppl, experts, f"{numbers['seconds']['median']:.3f}"]
    if low is None:
        return [*row, "" if mean is None else f"{mean:.3f}", "", ""]
    return [*row, f"{mean:.3f}", f"{low:.3f} to {high:.3f}", "below the noise" if low <= 1 <= high else ""]

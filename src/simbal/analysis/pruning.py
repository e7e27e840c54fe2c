"""What a run loses, and how much time it saves, when experts of small weight are not computed.

Reference: dynamic-k pruning, arXiv 2506.14038, section 4.4 and table 6.
Shapes: L MoE layers, K experts per token.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.table import Table

from simbal.analysis.finding import Finding
from simbal.analysis.pruned_layers import Pruning, pruned
from simbal.analysis.quality import document_sums
from simbal.analysis.trained import TrainedRun, check_pass
from simbal.checks import one_of, whole_number
from simbal.console import new_grid
from simbal.errors import UserError
from simbal.metrics import language

DEFINITION = {
    "pruning": "a chosen expert is computed if its weight divided by the sum of the token's weights is at least the "
    "threshold (rule=relative: threshold times the token's largest)",
    "experts_prune_<threshold>": "experts computed for a token, mean over tokens and layers",
    "seconds_prune_<threshold>": "time on a clock of a pass over all tokens, head and loss included, arms taking turns",
    "loss": "cross-entropy in nats, mean over tokens; no auxiliary loss, no z-loss",
    "ppl_prune_<threshold>": "exp of the loss; plain is the run's usual forward pass",
}


@dataclass
class Arm:
    """One way to go over the tokens; `pruning` None is the usual forward pass."""

    pruning: Pruning | None
    loss: float = 0.0
    experts_L: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The threshold."""
        return f"{self.pruning.threshold:g}" if self.pruning else "plain"

    @property
    def summary(self) -> dict[str, Any]:
        """The arm's numbers."""
        return {
            "threshold": self.pruning and self.pruning.threshold,
            "loss": self.loss,
            "ppl": language.perplexity(self.loss, 1),
            "experts": sum(self.experts_L) / len(self.experts_L),
            "seconds": {"median": median(self.seconds), "min": min(self.seconds), "max": max(self.seconds)},
        }


def pruning(
    trained: TrainedRun,
    tokens: int | None,
    batch_size: int,
    thresholds: list[float],
    rule: str,
    renorm_after: bool,
    allow_none: bool,
    repeats: int,
) -> Finding:
    """Perplexity, experts per token and seconds at each threshold.

    Args:
        trained: the run.
        tokens: from the start of the validation split; None: all of it.
        batch_size: sequences at once; seconds depend on it.
        thresholds: each between 0 and 1.
        rule: absolute | relative.
        renorm_after: divide the kept weights by their sum.
        allow_none: a token may lose all its experts.
        repeats: passes of each arm.

    Raises:
        UserError: the model is dense, or a key is out of its range.
    """
    _check(trained, thresholds, rule, repeats)
    check_pass("pruning", tokens, batch_size)
    prunings = [Pruning(threshold, rule, renorm_after, allow_none) for threshold in sorted(set(thresholds))]
    arms = [Arm(None), *(Arm(each) for each in prunings)]
    for arm in arms:
        _pass(trained, 1, batch_size, arm)  # whatever is slow once: one window, not timed
        arm.seconds.clear()
    counted = 0
    for turn in range(repeats):
        for arm in arms if turn % 2 == 0 else reversed(arms):  # so that no arm always follows the same other
            counted = _pass(trained, tokens, batch_size, arm)
    record = {
        "definition": DEFINITION,
        "tokens": counted,
        "metrics": _metrics(arms),
        "arms": {arm.name: arm.summary for arm in arms},
        "layers": {f"experts_{arm.name}": arm.experts_L for arm in arms},
        "backend": trained.model.backend,
    }
    notes = [f"{counted:,} tokens, {repeats} passes of each arm in turns; rule={rule}, renorm_after={renorm_after}."]
    return Finding([_table(arms)], notes, record)


def _pass(trained: TrainedRun, tokens: int | None, batch_size: int, arm: Arm) -> int:
    """Fill in the arm's numbers from one pass; how many tokens it was."""
    layers, shape = trained.model.feed_forwards, trained.model.shape
    cuda = trained.device.type == "cuda"
    with pruned(layers, arm.pruning) if arm.pruning else nullcontext() as kept_L:
        started = time.perf_counter()
        sums_G3 = document_sums(trained, tokens, batch_size, title=f"pruning: {arm.name}")
        if cuda:
            torch.cuda.synchronize(trained.device)
        arm.seconds.append(time.perf_counter() - started)
    nats, counted = sums_G3.sum(0)[0].item(), int(sums_G3[:, 1].sum())
    arm.loss = nats / counted
    arm.experts_L = [kept / counted for kept in kept_L] if kept_L else [float(shape.top_k)] * shape.num_layers
    return counted


def _metrics(arms: list[Arm]) -> dict[str, float]:
    metrics = {}
    for arm in arms:
        numbers = arm.summary
        metrics[f"ppl_prune_{arm.name}"] = numbers["ppl"]
        metrics[f"experts_prune_{arm.name}"] = numbers["experts"]
        metrics[f"seconds_prune_{arm.name}"] = numbers["seconds"]["median"]
    return metrics


def _check(trained: TrainedRun, thresholds: Any, rule: str, repeats: Any) -> None:
    if not trained.model.shape.num_experts:
        raise UserError(f"analysis.pruning prunes experts, and {trained.path} has none: its model is dense")
    listed = isinstance(thresholds, list) and bool(thresholds)
    if not (listed and all(type(tau) in (int, float) and 0 <= tau <= 1 for tau in thresholds)):
        raise UserError(f"analysis.pruning.thresholds={thresholds} must be a list of numbers between 0 and 1")
    one_of("analysis.pruning.rule", rule, ("absolute", "relative"))
    whole_number("analysis.pruning.repeats", repeats, 1)


def _table(arms: list[Arm]) -> Table:
    grid = new_grid("experts of small weight are not computed")
    for heading in ("threshold", "loss", "ppl", "experts", "seconds", "min", "max", "/ plain"):
        grid.add_column(heading, justify="right")
    plain = median(arms[0].seconds)
    for arm in arms:
        numbers = arm.summary
        seconds = numbers["seconds"]
        grid.add_row(
            arm.name, f"{numbers['loss']:.4f}", f"{numbers['ppl']:,.3f}", f"{numbers['experts']:.3f}",
            *(f"{seconds[key]:.3f}" for key in ("median", "min", "max")), f"{seconds['median'] / plain:.3f}",
        )  # fmt: skip
    return grid

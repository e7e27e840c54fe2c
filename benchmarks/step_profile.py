"""Time of each part of a training step, forward and backward.

Operators of the forward pass are attributed to the function that called them, and operators of the backward pass to
their forward operator (both have the same sequence number in the profiler).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from simbal.balancing.composition import Composition
from simbal.balancing.step import StepInProgress
from simbal.experts.backends import RoutingPlan
from simbal.model import moe
from simbal.model.attention import Attention
from simbal.model.router import Router
from simbal.training import module as lit_moe

BACKWARD = "autograd::engine::evaluate_function: "
PARTS: tuple[tuple[Any, str, str], ...] = (
    (Attention, "forward", "attention"),
    (Router, "forward", "router"),
    (RoutingPlan, "build", "routing plan"),
    (moe, "apply_experts", "experts"),
    (lit_moe, "head_loss", "head"),
    (torch.nn.RMSNorm, "forward", "norms"),
    (torch.nn.Embedding, "forward", "embedding"),
    (Composition, "losses", "balancing"),
    (Composition, "measure", "balancing"),
    (Composition, "update", "balancing"),
    (lit_moe.LitMoE, "configure_gradient_clipping", "clipping"),
    (StepInProgress, "add", "telemetry"),
)


def profile(train: Callable[[Iterable[Tensor]], None], batches: Tensor, warm_up: int = 5, steps: int = 5) -> None:
    """Print each part's fraction of the time; profiling overstates small operators."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
    for owner, name, label in PARTS:
        setattr(owner, name, spanned(getattr(owner, name), f"part: {label}"))
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def watched() -> Iterator[Tensor]:
        for taken in range(warm_up + steps):
            if taken == warm_up:
                profiler.start()
            with record_function("part: rest"):
                yield batches[taken % len(batches)]
        profiler.stop()

    try:
        train(watched())
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    events = profiler.events()
    assert events is not None
    shares(list(events), steps)


def spanned(function: Any, label: str) -> Any:
    """Return `function` under a name for the profiler."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return run


def part_of(event: Any) -> str:
    """Return the innermost part that contains an event."""
    while event is not None:
        if event.name.startswith("part: "):
            return str(event.name[6:])
        if event.name.startswith("Optimizer.step"):
            return "optimizer"
        event = event.cpu_parent
    return "rest"


def shares(events: list[Any], steps: int) -> None:
    """Print each part's forward and backward time, and the ten slowest operators."""
    forward: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD) and "Backward" not in event.name:
            forward[event.sequence_nr] = part_of(event)
    spent: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    operators: Counter[str] = Counter()
    for event in events:
        operators[event.name] += event.self_cpu_time_total
        node = event
        while node is not None and not node.name.startswith(BACKWARD):
            node = node.cpu_parent
        if node is None:
            spent["forward"][part_of(event)] += event.self_cpu_time_total
        else:
            part = forward.get(node.sequence_nr, "rest") if node.sequence_nr >= 0 else "rest"
            spent["backward"][part] += event.self_cpu_time_total
    total = sum(sum(times.values()) for times in spent.values())
    print(f"{'part':14} {'forward':>8} {'backward':>8}   of {total / steps / 1e3:.1f} ms under the profiler")
    for part, _ in (spent["forward"] + spent["backward"]).most_common():
        print(f"{part:14} {spent['forward'][part] / total:8.1%} {spent['backward'][part] / total:8.1%}")
    for name, time in operators.most_common(10):
        print(f"  {name:60} {time / total:6.1%}")

"""The paper's own numbers, to be printed beneath ours: for its models and its data, which are not ours.

Reference: arXiv 2506.14038, tables 3, 4 and 8.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table as Grid

from simbal.console import new_grid
from simbal.sweep.arms import ABSENT
from simbal.sweep.table import Table


class Reported(NamedTuple):
    """One trained model of the paper; None where it says nothing."""

    balancing: str
    model: str
    gating: str
    ppl: float | None = None
    min_pes: float | None = None
    seu: float | None = None
    entropy: float | None = None
    gram_deviation: float | None = None


PAPER = (
    Reported("none", "Dense-M", ABSENT, 19.468),
    Reported("none", "Dense-L", ABSENT, 10.047),
    Reported("lbl", "MoE-M", "softmax", 14.086, 0.0255, gram_deviation=0.0141501),
    Reported("lbl", "MoE-L", "softmax", 8.517, 0.0241, 1.000, 1.268, 0.0311),
    Reported("simbal", "MoE-M", "softmax", 13.685, 0.0044, gram_deviation=5.7707e-09),
    Reported("simbal", "MoE-L", "softmax", 8.304, 0.0028, 0.991, 1.168, 2.121e-8),
    Reported("lf", "MoE-M", "softmax", 13.708, seu=0.505),
    Reported("lf_lbl", "MoE-M", "softmax", 14.154, seu=0.997),
    Reported("lf_simbal", "MoE-M", "softmax", 13.695, seu=0.755),
    Reported("lf", "MoE-M", "sigmoid", 13.618, seu=0.381),
    Reported("lf_lbl", "MoE-M", "sigmoid", 14.015, seu=0.997),
    Reported("lf_simbal", "MoE-M", "sigmoid", 13.637, seu=0.476),
)
NAMES = {
    "val/ppl": "ppl",
    "quality.ppl": "ppl",
    "redundancy.min_pes": "min_pes",
    "routing/seu": "seu",
    "routing.seu": "seu",
    "routing/entropy": "entropy",
    "routing.entropy_topk": "entropy",
    "router/gram_deviation": "gram_deviation",
    "orthogonality.gram_deviation_bf16": "gram_deviation",
}


def paper_grid(table: Table) -> Grid | None:
    """What the paper reports of the strategies and the columns of `table`; None if that is nothing."""
    metrics = [metric for metric in table.metrics if metric.key in NAMES]
    arms = {row.arm.balancing for row in table.rows}
    rows = [reported for reported in PAPER if reported.balancing in arms]
    if not metrics or not rows:
        return None
    grid = new_grid("the paper's numbers, for its own models and data (arXiv 2506.14038, tables 3, 4, 8, 9)")
    for column in ("balancing", "model", "gating"):
        grid.add_column(column)
    for metric in metrics:
        grid.add_column(metric.heading, justify="right", overflow="fold")
    for reported in rows:
        values: Sequence[float | None] = [getattr(reported, NAMES[metric.key]) for metric in metrics]
        cells = [ABSENT if value is None else m.number.format(value) for m, value in zip(metrics, values, strict=True)]
        grid.add_row(reported.balancing, reported.model, reported.gating, *cells)
    return grid

"""The paper's own numbers, which stand beside ours: they are of its models and its data.

Reference: arXiv 2506.14038, tables 3, 4, 8, 9 and 10.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from simbal.analysis.gram_quanta import PAPER as LAYERS
from simbal.metrics.table import Metric
from simbal.report.arms import Arm
from simbal.report.columns import ABSENT, NAMED, Cell, number_cell

HEADING = "paper M / L"
NOTE = (
    "paper M / L: what arXiv 2506.14038 (tables 3, 4, 8, 9 and 10) reports of its own models (Dense-M or MoE-M, "
    "Dense-L or MoE-L) on its own data."
)


class Reported(NamedTuple):
    """A quantity in the paper's two sizes; None where it reports nothing."""

    medium: float | None = None
    large: float | None = None


MEDIUM, LARGE = LAYERS.values()  # tables 9 and 10, whose means table 3 rounds
PAPER: dict[tuple[str, str], dict[str, Reported]] = {
    ("dense", ABSENT): {"ppl": Reported(19.468, 10.047)},
    ("lbl", "softmax"): {
        "ppl": Reported(14.086, 8.517),
        "min_pes": Reported(0.0255, 0.0241),
        "seu": Reported(None, 1.000),
        "entropy": Reported(None, 1.268),
        "gram_deviation": Reported(fmean(MEDIUM.lbl), fmean(LARGE.lbl)),
    },
    ("simbal", "softmax"): {
        "ppl": Reported(13.685, 8.304),
        "min_pes": Reported(0.0044, 0.0028),
        "seu": Reported(None, 0.991),
        "entropy": Reported(None, 1.168),
        "gram_deviation": Reported(fmean(MEDIUM.simbal), fmean(LARGE.simbal)),
    },
    ("lf", "softmax"): {"ppl": Reported(13.708), "seu": Reported(0.505)},
    ("lf_lbl", "softmax"): {"ppl": Reported(14.154), "seu": Reported(0.997)},
    ("lf_simbal", "softmax"): {"ppl": Reported(13.695), "seu": Reported(0.755)},
    ("lf", "sigmoid"): {"ppl": Reported(13.618), "seu": Reported(0.381)},
    ("lf_lbl", "sigmoid"): {"ppl": Reported(14.015), "seu": Reported(0.997)},
    ("lf_simbal", "sigmoid"): {"ppl": Reported(13.637), "seu": Reported(0.476)},
}


def reported(arm: Arm, metrics: Sequence[Metric]) -> dict[str, Reported]:
    """Return what the paper reports in these columns for an arm, by key.

    It is matched by balancing and gating, or as a dense model.
    """
    config = arm.runs[0].spec.config
    dense = config.model.num_experts == 0
    known = PAPER.get(("dense", ABSENT) if dense else (arm.balancing, config.router.gating), {})
    return {metric.key: known[metric.name] for metric in metrics if metric.name in known}


def paper_cell(metric: Metric, numbers: Reported | None) -> Cell:
    """Return `13.685 / 8.304`, with a dash for what the paper does not report."""
    if numbers is None:
        return Cell(ABSENT)
    medium, large = (number_cell(NAMED[metric.name].number, value) for value in numbers)
    return Cell(f"{medium.text} /", medium.value, large.text)

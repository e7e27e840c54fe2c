"""The paper's own numbers, which stand beside ours: they are of its models and its data.

Reference: arXiv 2506.14038, tables 3, 4, 8, 9 and 10.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from simbal.analysis.gram_quanta import PAPER as LAYERS
from simbal.report.arms import ABSENT, Arm

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
NUMBERS = {"ppl": "{:.3f}", "min_pes": "{:.4f}", "seu": "{:.3f}", "entropy": "{:.3f}", "gram_deviation": "{:.2e}"}
NAMES = {
    "val/ppl": "ppl",
    "quality.ppl": "ppl",
    "pes/min": "min_pes",
    "redundancy.min_pes": "min_pes",
    "routing/seu": "seu",
    "routing.seu": "seu",
    "routing/entropy": "entropy",
    "routing.entropy_topk": "entropy",
    "router/gram_deviation": "gram_deviation",
    "orthogonality.gram_deviation_bf16": "gram_deviation",
}


def reported(arm: Arm, keys: Sequence[str]) -> dict[str, Reported]:
    """Return what the paper reports in these columns for an arm, by column.

    It is matched by balancing and gating, or as a dense model.
    """
    config = arm.runs[0].spec.config
    dense = config.model.num_experts == 0
    known = PAPER.get(("dense", ABSENT) if dense else (arm.balancing, config.router.gating), {})
    return {key: known[NAMES[key]] for key in keys if NAMES.get(key) in known}


def write(key: str, numbers: Reported | None, separator: str = " ") -> str:
    """Return `13.685 / 8.304`, with a dash for what the paper does not report."""
    if numbers is None:
        return ABSENT
    number = NUMBERS[NAMES[key]]
    medium, large = (ABSENT if value is None else number.format(value) for value in numbers)
    return f"{medium} /{separator}{large}"

"""The numbers that the paper reports for its own models and data, shown next to ours.

Reference: arXiv 2506.14038, section 4.2 (five seeds of MoE-M), tables 3, 4, 7, 8, 9 and 10.
"""

from collections.abc import Sequence
from typing import NamedTuple

from simbal.config.layers import LAYER_KEYS
from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm
from simbal.report.columns import ABSENT, NAMED, Cell, number_cell

HEADING = "paper M / L"
NOTE = (
    "paper M / L: results of arXiv 2506.14038 (tables 3, 4, 7, 8, 9 and 10) for Dense-M or MoE-M and Dense-L or MoE-L, "
    "with the paper's data and learning rates and the same strategies, coefficients and gating. ± is the standard "
    "deviation over five seeds; numbers without ± are from one run."
)
NOTHING_REPORTED = "The paper reports none of these columns for these strategies."
READING = {"schedule": None, "scope": "sequence", "norm": "E", "reduction": "sum", "over_layers": None}
READING |= dict.fromkeys(LAYER_KEYS)


class Reported(NamedTuple):
    """A number for the paper's two model sizes; None if it is not reported."""

    medium: float | None = None
    large: float | None = None
    medium_sd: float | None = None  # over five seeds; None: `medium` is from one run


# by strategies, gating, and the strategies' coefficients
PAPER: dict[tuple[str, str, tuple[float, ...]], dict[str, Reported]] = {
    ("dense", ABSENT, ()): {"ppl": Reported(19.468, 10.047)},
    ("lbl", "softmax", (0.01,)): {
        "ppl": Reported(14.051, 8.517, 0.026),
        "min_pes": Reported(0.0255, 0.0241),
        "seu": Reported(None, 1.000),
        "entropy": Reported(None, 1.268),
        "gram_deviation": Reported(0.01415007625, 0.031143550833333335),  # means over the layers of tables 9 and 10
    },
    ("simbal", "softmax", (0.01,)): {"ppl": Reported(13.687), "min_pes": Reported(0.0050)},
    ("simbal", "softmax", (0.1,)): {
        "ppl": Reported(13.691, 8.304, 0.039),
        "min_pes": Reported(0.0044, 0.0028),
        "seu": Reported(None, 0.991),
        "entropy": Reported(None, 1.168),
        "gram_deviation": Reported(5.770730375e-09, 2.1209714883333336e-08),
    },
    ("simbal", "softmax", (1.0,)): {"ppl": Reported(13.716), "min_pes": Reported(0.0045)},
    ("lf", "softmax", ()): {"ppl": Reported(13.708), "seu": Reported(0.505)},
    ("lf_lbl", "softmax", (0.01,)): {"ppl": Reported(14.154), "seu": Reported(0.997)},
    ("lf_simbal", "softmax", (0.1,)): {"ppl": Reported(13.695), "seu": Reported(0.755)},
    ("lf", "sigmoid", ()): {"ppl": Reported(13.618), "seu": Reported(0.381)},
    ("lf_lbl", "sigmoid", (0.01,)): {"ppl": Reported(14.015), "seu": Reported(0.997)},
    ("lf_simbal", "sigmoid", (0.1,)): {"ppl": Reported(13.637), "seu": Reported(0.476)},
}


def reported(arm: Arm, metrics: Sequence[Metric]) -> dict[str, Reported]:
    """Return the paper's numbers for an arm, by the keys of the metrics.

    Arms are matched by strategies, coefficients and gating, or as a dense model. An arm with a coefficient schedule,
    another variant of the loss, another `router.scale` or `router.input`, or token tables matches nothing.
    """
    config = arm.runs[0].spec.config
    if config.model.num_experts == 0:
        known = PAPER["dense", ABSENT, ()]
    else:
        strategies = config.balancing.values()
        coefs = tuple(float(keys["coef"]) for keys in strategies if "coef" in keys)
        same = all(keys.get(key, value) == value for keys in strategies for key, value in READING.items())
        same &= (config.router.scale, config.router.input, config.model.token_table) == (1, "hidden", False)
        known = PAPER.get((arm.balancing, config.router.gating, coefs), {}) if same else {}
    return {metric.key: known[metric.name] for metric in metrics if metric.name in known}


def paper_cell(metric: Metric, numbers: Reported | None) -> Cell:
    """Return `13.691 ± 0.039 / 8.304`, with dashes for numbers that are not reported."""
    if numbers is None:
        return Cell(ABSENT)
    number = NAMED[metric.name].number
    medium, large = number_cell(number, numbers.medium), number_cell(number, numbers.large)
    spread = "" if numbers.medium_sd is None else f" ± {number.format(numbers.medium_sd)}"
    return Cell(f"{medium.text}{spread} /", medium.value, large.text)

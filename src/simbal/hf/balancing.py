"""The analysis `balancing`: runs a Hugging Face MoE to find out how its own code balances the load of experts.

It uses random tokens instead of the data, and prints the findings of `simbal.hf.describe`.
"""

from dataclasses import asdict

from simbal.analysis.result import Result
from simbal.console import new_grid
from simbal.hf.describe import describe
from simbal.hf.model import HFModel

DEFINITION = {
    "findings": "results of a few passes over random tokens in training mode, each with a kind, a fact and advice; "
    "kinds: no_loss, on, off, zero, config_ignored, trl for the auxiliary loss; formula, factor_k, double_softmax, "
    "pooled, other_gating, unknown for its formula; mask, padding, gradient, no_gradient, accumulation for its tokens "
    "and gradient; "
    "idle_bias, moving_bias for the routers' bias; frozen for routers without gradients",
}


def balancing(hf: HFModel) -> Result:
    """Describe how a model's own code balances load.

    Raises:
        UserError: the model has no known routers, or some weights are not in memory.
    """
    description = describe(hf.model)
    grid = new_grid(f"{description.model}: {description.routers}")
    for heading in ("fact", "what to do"):
        grid.add_column(heading, overflow="fold")
    for finding in description.findings:
        grid.add_row(finding.fact, finding.advice)
    return Result([grid], [], {"definition": DEFINITION, **asdict(description), "metrics": {}})

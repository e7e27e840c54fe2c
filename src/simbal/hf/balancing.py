"""The analysis `balancing`: what the code of a Hugging Face MoE does about load balance, found by running it.

It uses random tokens instead of the text of `hf=`, and prints the findings of `simbal.hf.describe`.
"""

from simbal.analysis.result import Result
from simbal.console import new_grid
from simbal.hf.describe import describe
from simbal.hf.model import HFModel

DEFINITION = {
    "findings": "results of a few passes over random tokens in training mode, each with a kind, a fact and advice; "
    "kinds: no_loss, on, off, zero, config_ignored of the auxiliary loss; formula, factor_k, pooled, other_gating, "
    "unknown of what it computes; mask, padding, gradient, no_gradient, accumulation of what it counts; idle_bias, "
    "moving_bias of the routers",
}


def balancing(hf: HFModel) -> Result:
    """Describe what a model's own code does about balance.

    Raises:
        UserError: the model has no known routers, or some weights are not in memory.
    """
    found = describe(hf.model)
    findings = [finding for finding in found.findings if finding.kind != "frozen"]  # analyses need no gradients
    grid = new_grid(f"{found.model}: {found.routers}")
    for heading in ("fact", "what to do"):
        grid.add_column(heading, overflow="fold")
    for finding in findings:
        grid.add_row(finding.fact, finding.advice)
    rows = [vars(finding) for finding in findings]
    record = {"definition": DEFINITION, "model": found.model, "routers": found.routers, "findings": rows, "metrics": {}}
    return Result([grid], [], record)

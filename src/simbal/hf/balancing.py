"""The analysis `balancing`: what a Hugging Face MoE's own code does about balance, found by running it.

The sentences are those of `simbal.hf.describe`.
"""

from rich.table import Table

from simbal.analysis.result import Result
from simbal.console import new_grid
from simbal.hf.describe import describe
from simbal.hf.model import HFModel

DEFINITION = {
    "findings": "what a few passes over random tokens in training mode show, each of a kind, a fact and what to do; "
    "kinds: off, on and zero of the auxiliary loss as it is set; formula, factor_k, pooled, padding or "
    "mask, gradient or no_gradient, accumulation of what it is; idle_bias of the routers",
}


def balancing(hf: HFModel) -> Result:
    """Describe the model; the text that `hf=` asks for is not read by it.

    Raises:
        UserError: it has no routers that are known, or its weights are not all in memory.
    """
    found = describe(hf.model)
    findings = [finding for finding in found.findings if finding.kind != "frozen"]  # for measuring, all of it is
    grid: Table = new_grid(f"{found.model}: {found.routers}")
    for heading in ("fact", "what to do"):
        grid.add_column(heading, overflow="fold")
    for finding in findings:
        grid.add_row(finding.fact, finding.advice)
    said = [{"kind": finding.kind, "fact": finding.fact, "advice": finding.advice} for finding in findings]
    record = {"definition": DEFINITION, "model": found.model, "routers": found.routers, "findings": said, "metrics": {}}
    return Result([grid], [], record)

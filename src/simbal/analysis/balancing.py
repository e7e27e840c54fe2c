"""The analysis `balancing`: what the code of a model of Hugging Face does about balance when somebody trains it."""

from dataclasses import asdict

from simbal.analysis.shared.finding import Finding, numbers_table
from simbal.analysis.shared.host_model import HostModel
from simbal.analysis.shared.subject import routers_of
from simbal.host.describe import describe

DEFINITION = {
    "fact": "what the model did on random tokens, whatever its config says",
    "advice": "what its user may do about it, in Python",
}


def balancing(host: HostModel) -> Finding:
    """Say which auxiliary losses the model's own code has, on which tokens, and what they move.

    Args:
        host: the model.

    Raises:
        UserError: it is dense, or it has routers that are not known, or its weights are not all in memory.
    """
    routers_of(host, "balancing")
    description = describe(host.model)
    rows = [(finding.kind, finding.fact, finding.advice) for finding in description.findings]
    table = numbers_table(f"{description.model}", ("", "fact", "what to do"), rows, texts=3)
    record = {
        "definition": DEFINITION,
        "routers": description.routers,
        "findings": [asdict(finding) for finding in description.findings],
    }
    return Finding([table], [f"{description.routers}."], record)

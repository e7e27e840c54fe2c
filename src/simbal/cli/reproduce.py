"""Test the paper's claims again: train every study of a scale, analyse it, and write the evidence to results/.

Examples:
    python reproduce.py scale=cpu                         # hours; the same command goes on where it was stopped
    python reproduce.py scale=cpu only=[collapse]
    python reproduce.py scale=cpu figures=true            # draw the figures in results/ again
    python reproduce.py scale=cpu verify=true             # compute the numbers in results/ again
"""

from typing import Any

from simbal.cli.command_line import run
from simbal.errors import exit_on_user_error


def main(argv: list[str]) -> None:
    """Do the studies that a command line names."""
    run(reproduce_composed, __doc__, argv, "reproduce")


def reproduce_composed(cfg: Any) -> None:
    """Do the studies that `cfg` names."""
    with exit_on_user_error():
        from simbal.config.check import resolved
        from simbal.report.reproduce.reproduce import reproduce  # figures: 1.5 s that --help does not pay

        reproduce(resolved(cfg))

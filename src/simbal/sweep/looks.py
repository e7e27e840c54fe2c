"""A sweep that looks at its arms after every few seeds, and ends once each is decided: `until=decided`.

The looks keep the error of the whole at 5%, as `simbal.report.sequential` says; where several arms are compared with
the baseline, each has its share of it (Bonferroni). What is looked at is the final validation loss, whose differences
are those of the logarithm of perplexity.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from simbal.errors import UserError
from simbal.metrics.table import NUMBERS
from simbal.report.collect import collect
from simbal.report.conclusion import ALPHA
from simbal.report.sequential import decided
from simbal.report.table import build

(LOSS,) = (metric for metric in NUMBERS if metric.key == "val/loss")
WORDS = {"lower": "better", "higher": "worse"}


def seeds_of_looks(first: Sequence[int], most: int) -> list[list[int]]:
    """Return the seeds that each look adds: those asked for, then as many further ones, `most` in all.

    Raises:
        UserError: there are fewer than two seeds for a look, or more than `most`.
    """
    if not 2 <= len(first) <= most:
        raise UserError(
            f"until=decided looks after every {len(first)} seeds: give at least two, as by seed=0-4, and at most "
            f"max_seeds={most}"
        )
    following = range(max(first) + 1, max(first) + 1 + most - len(first))
    return [[*first], *([*following[start : start + len(first)]] for start in range(0, len(following), len(first)))]


def look(folder: Path, seeds: Collection[int], looks: Sequence[int], most: int) -> dict[str, str | None]:
    """Return what the runs in `folder` decide of each arm that has a baseline, by its name; None: not yet.

    Args:
        folder: outputs/<name>.
        seeds: of this look and those before; runs of others do not count.
        looks: how many seeds there are at each look of the plan.
        most: seeds of the whole plan.

    Raises:
        UserError: no arm has a baseline, or a seed is missing, as its run has failed.
    """
    runs = [run for run in collect(folder) if run.finished and run.seed in seeds]
    table = build(folder.name, runs, metrics=[LOSS])
    rows = [row for row in table.compared if row.other is not None]
    if not rows:
        raise UserError(
            "until=decided: no arm differs from the baseline in balancing alone, so there is none to decide"
        )
    decisions: dict[str, str | None] = {}
    for row in rows:
        assert row.other
        ours, theirs = row.arm.values(LOSS.key), row.other.values(LOSS.key)
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs)]
        if len(differences) != len(seeds):
            raise UserError(
                f"until=decided: {row.arm.name} shares {len(differences)} of {len(seeds)} seeds with {row.other.name}, "
                "and a look needs them all: the same command with retry_failed=true tries failed runs again"
            )
        decision = decided(differences, looks, most, table.margin, ALPHA / len(rows))
        decisions[row.arm.name] = WORDS.get(decision, decision) if decision else None
    return decisions


def sentence(decisions: dict[str, str | None], pairs: int, most: int) -> str:
    """Return a look as one line: `5 of at most 40 seeds: simbal worse, lf not yet decided`."""
    said = ", ".join(f"{name} {decision or 'not yet decided'}" for name, decision in decisions.items())
    return f"{pairs} of at most {most} seeds: {said}"

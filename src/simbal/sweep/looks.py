"""A sweep that looks at its arms after every few seeds, and ends once each is decided: `until=decided`.

The looks keep the error of the whole at 5%, as `simbal.report.sequential` says; where several arms are compared with
the baseline, each has its share of it (Bonferroni). What is looked at is the final validation loss, whose differences
are those of the logarithm of perplexity.
"""

from collections.abc import Sequence

from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS
from simbal.report.arms import group_runs, label_columns
from simbal.report.collect import Run, collect
from simbal.report.comparison import baseline_arms
from simbal.report.sequential import decide
from simbal.report.statistics import ALPHA
from simbal.report.table import build
from simbal.sweep.composer import Job

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


def require_decidable(jobs: Sequence[Job]) -> None:
    """Raise `UserError` unless the jobs share a folder and an arm differs from the baseline in balancing alone."""
    if len({job.spec.path.parent for job in jobs}) > 1:
        raise UserError("until=decided: the arms have several names, and only one folder can be looked at")
    specs = [job.spec for job in jobs]
    arms = group_runs([Run(spec.path, {}, spec, None) for spec in specs], label_columns(specs))
    others = zip(arms, baseline_arms(arms, specs[0].config.baseline), strict=True)
    if not any(len(rival) == 1 and rival[0] is not arm for arm, rival in others):
        raise UserError(
            "until=decided: no arm differs from the baseline in balancing alone, so there is none to decide"
        )


def look(jobs: Sequence[Job], looks: Sequence[int], most: int) -> dict[str, str | None]:
    """Return what the runs decide of each arm that has a baseline, by its name; None: not yet.

    Args:
        jobs: of this look and those before; other runs of their folder do not count.
        looks: how many seeds there are at each look of the plan.
        most: seeds of the whole plan.

    Raises:
        UserError: a run has not finished.
    """
    (folder,) = {job.spec.path.parent for job in jobs}
    names = {job.spec.path.name for job in jobs}
    runs = [run for run in collect(folder) if run.path.name in names and run.finished]
    if len(runs) < len(jobs):
        raise UserError(
            f"until=decided: {len(jobs) - len(runs)} of {len(jobs)} runs have not finished, and a look needs them all: "
            "the same command with retry_failed=true tries failed runs again"
        )
    config = jobs[0].spec.config
    table = build(folder.name, runs, config.baseline, [LOSS], margin=config.equivalence_margin)
    decisions: dict[str, str | None] = {}
    for row in table.compared:
        assert row.other
        ours, theirs = row.arm.values(LOSS.key), row.other.values(LOSS.key)
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours)]
        decision = decide(differences, looks, most, table.margin, ALPHA / len(table.compared))
        decisions[row.arm.name] = WORDS.get(decision, decision) if decision else None
    return decisions


def sentence(decisions: dict[str, str | None], pairs: int, most: int) -> str:
    """Return a look as one line: `5 of at most 40 seeds: simbal worse, lf not yet decided`."""
    said = ", ".join(f"{name} {decision or 'not yet decided'}" for name, decision in decisions.items())
    return f"{pairs} of at most {most} seeds: {said}"

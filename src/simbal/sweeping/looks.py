"""Sequential looks at the results of a sweep: `until=decided` adds seeds until every arm is decided.

All looks together keep the error rate at 5% (see `simbal.report.sequential`). Several arms share this rate equally
(Bonferroni). A look compares final validation losses.
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
from simbal.sweeping.composer import Job

(LOSS,) = (metric for metric in NUMBERS if metric.key == "val/loss")
WORDS = {"lower": "better", "higher": "worse"}


def seeds_of_looks(first: Sequence[int], max_seeds: int) -> list[list[int]]:
    """Return the seeds that each look adds: first the given seeds, then as many new ones, `max_seeds` in total.

    Raises:
        UserError: there are fewer than two seeds for a look, or more than `max_seeds`.
    """
    if not 2 <= len(first) <= max_seeds:
        raise UserError(
            f"until=decided needs at least two seeds, such as seed=0-4, and at most max_seeds={max_seeds} "
            f"(got {len(first)})"
        )
    following = range(max(first) + 1, max(first) + 1 + max_seeds - len(first))
    return [[*first], *([*following[start : start + len(first)]] for start in range(0, len(following), len(first)))]


def check_decidable(jobs: Sequence[Job]) -> None:
    """Raise `UserError` unless all jobs have one name and an arm differs from the baseline only in its balancing."""
    if len({job.spec.path.parent for job in jobs}) > 1:
        raise UserError("until=decided needs a single name=, because it compares the runs of one folder")
    specs = [job.spec for job in jobs]
    arms = group_runs([Run(spec.path, {}, spec, None) for spec in specs], label_columns(specs))
    baselines = baseline_arms(arms, specs[0].config.baseline)
    if not any(len(of_arm) == 1 and of_arm[0] is not arm for arm, of_arm in zip(arms, baselines, strict=True)):
        raise UserError("until=decided needs an arm that differs from the baseline only in its balancing")


def decide_arms(jobs: Sequence[Job], looks: Sequence[int], max_seeds: int) -> dict[str, str | None]:
    """Return the decision on each arm that has a baseline, by name of the arm; None: not yet decided.

    Args:
        jobs: all jobs so far. Other runs in their folder do not count.
        looks: the number of seeds at each planned look.
        max_seeds: the number of seeds at the last look.

    Raises:
        UserError: a run is not finished.
    """
    (folder,) = {job.spec.path.parent for job in jobs}
    names = {job.spec.path.name for job in jobs}
    runs = [run for run in collect(folder) if run.path.name in names and run.finished]
    if len(runs) < len(jobs):
        raise UserError(
            f"until=decided: {len(jobs) - len(runs)} of {len(jobs)} runs have not finished; rerun the command, with "
            "retry_failed=true to repeat failed runs"
        )
    config = jobs[0].spec.config
    table = build(folder.name, runs, config.baseline, [LOSS], margin=config.equivalence_margin)
    decisions: dict[str, str | None] = {}
    for row in table.compared:
        assert row.other
        ours, theirs = row.arm.values(LOSS.key), row.other.values(LOSS.key)
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours)]
        decision = decide(differences, looks, max_seeds, table.margin, ALPHA / len(table.compared))
        decisions[row.arm.name] = WORDS.get(decision, decision) if decision else None
    return decisions


def format_look(decisions: dict[str, str | None], num_seeds: int, max_seeds: int) -> str:
    """Return a look as one line: `5 of at most 40 seeds: simbal worse, lf not yet decided`."""
    arms = ", ".join(f"{name} {decision or 'not yet decided'}" for name, decision in decisions.items())
    return f"{num_seeds} of at most {max_seeds} seeds: {arms}"

"""Sequential looks at the results of a sweep: `until=decided` adds seeds until every arm is decided.

A look compares final validation losses by simultaneous intervals. All looks together keep the error rate at 5% (see
`simbal.report.sequential`).
"""

from collections.abc import Sequence

from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS
from simbal.report.arms import group_runs, label_columns
from simbal.report.collect import Run, collect
from simbal.report.comparison import baseline_arms, compare
from simbal.report.sequential import boundaries
from simbal.report.statistics import UNRESOLVED
from simbal.sweeping.composer import Job

(LOSS,) = (metric for metric in NUMBERS if metric.key == "val/loss")


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


def check_decidable(jobs: Sequence[Job], max_seeds: int) -> None:
    """Raise `UserError` unless the jobs have one name, an arm that can be decided, and seeds for the looks.

    Such an arm differs from the baseline only in its balancing.
    """
    if len({job.spec.path.parent for job in jobs}) > 1:
        raise UserError("until=decided needs a single name=, because it compares the runs of one folder")
    specs = [job.spec for job in jobs]
    seeds_of_looks(sorted({spec.config.seed for spec in specs}), max_seeds)
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
    look = looks.index(len({job.spec.config.seed for job in jobs}))
    level = boundaries(looks, max_seeds)[look]
    arms = group_runs(runs, label_columns([run.spec for run in runs]))
    rows = compare(arms, config.baseline, [LOSS], config.equivalence_margin, alpha=level)
    decisions: dict[str, str | None] = {}
    for row in rows:
        if row.other:
            if reason := row.arm.untrained or row.other.untrained:
                raise UserError(f"until=decided: no conclusion is possible: {reason}")
            word = row.differences[LOSS.key].conclusion
            is_open = word == UNRESOLVED and look < len(looks) - 1
            decisions[row.arm.name] = None if is_open else word
    return decisions


def format_look(decisions: dict[str, str | None], num_seeds: int, max_seeds: int) -> str:
    """Return a look as one line: `5 of at most 40 seeds: simbal worse, lf not yet decided`."""
    arms = ", ".join(f"{name} {decision or 'not yet decided'}" for name, decision in decisions.items())
    return f"{num_seeds} of at most {max_seeds} seeds: {arms}"

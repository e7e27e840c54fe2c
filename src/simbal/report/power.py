"""How many more pairs of seeds would decide a comparison, and how many hours of runs that is."""

from math import sqrt
from statistics import fmean

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.columns import Cell, number_cell
from simbal.report.comparison import Row
from simbal.report.conclusion import ALPHA, POWER, noncentrality
from simbal.report.sections import Section, comparison_name
from simbal.report.statistics import student_quantile
from simbal.report.table import Table

MIDPOINTS = 10_000  # of an integral over the sample's variance: its error is below 1e-6
HEADINGS = ("spread in nats", "pairs", "more to resolve", "their hours", "more to equate", "hours of these")


def pairs_to_resolve(sd: float, margin: float) -> int:
    """Return the fewest pairs with which a true difference of `margin` is found with 80% power, two-sided at 5%."""
    pairs = max(2, int(((_normal(1 - ALPHA / 2) + _normal(POWER)) * sd / margin) ** 2))
    while noncentrality(pairs - 1) > margin / sd * sqrt(pairs):
        pairs += 1
    return pairs


def pairs_to_equate(sd: float, margin: float) -> int:
    """Return the fewest pairs with which TOST at 5% finds equivalence with 80% power if the true difference is 0."""
    pairs = max(2, int(((_normal(1 - ALPHA) + _normal((1 + POWER) / 2)) * sd / margin) ** 2))
    while equivalence_power(margin, sd / sqrt(pairs), pairs - 1) < POWER:
        pairs += 1
    return pairs


def equivalence_power(margin: float, error: float, degrees_of_freedom: int, true: float = 0.0) -> float:
    """Return the chance that TOST at 5% finds a true difference to lie within ± `margin`.

    It is an integral over the distribution of the sample's variance of the chance that the mean is near enough to 0.
    Reference: D. J. Schuirmann (1987); K. F. Phillips, Journal of Pharmacokinetics and Biopharmaceutics 18 (1990).

    Args:
        margin: of equivalence.
        error: the true standard error of the mean.
        degrees_of_freedom: of the sample's variance.
        true: the true difference.
    """
    import numpy as np
    from scipy.special import gammaincinv, ndtr

    probabilities = (np.arange(MIDPOINTS) + 0.5) / MIDPOINTS
    errors = error * np.sqrt(gammaincinv(degrees_of_freedom / 2, probabilities) * 2 / degrees_of_freedom)
    reach = margin - student_quantile(1 - ALPHA, degrees_of_freedom) * errors
    chances = ndtr((reach - true) / error) - ndtr((-reach - true) / error)
    return float(np.where(reach > 0, chances, 0.0).mean())


def power_section(table: Table) -> Section:
    """Return the pairs that each comparison of a loss or perplexity still needs; `UserError` if there is none.

    The spread of the differences that there are is taken for the true one, and the hours for those of these runs, one
    after another.
    """
    margin = table.margin
    if margin is None:
        raise UserError("power=true: the runs name several margins; choose one with equivalence_margin=")
    rows, names = [], []
    for row in table.compared:
        for metric in table.metrics:
            if metric.margin and metric.key in row.differences and row.differences[metric.key].sd is not None:
                names.append(comparison_name(table, row))
                rows.append([Cell(names[-1]), Cell(metric.heading), *_cells(row, metric, margin)])
    if not rows:
        raise UserError("power=true: no comparison of a loss or perplexity has a spread; it takes two pairs of seeds")
    title = (
        f"more pairs of seeds for {POWER:.0%} power at 5%: to resolve a true difference of {margin:g} nats per token, "
        "or to show equivalence if there is none"
    )
    if len(table.compared) > 1:
        title += "; of each comparison by itself, where Holm's correction over all asks for more"
    return Section(title, ["arm", "metric", *HEADINGS], rows, 2, names)


def _cells(row: Row, metric: Metric, margin: float) -> list[Cell]:
    difference = row.differences[metric.key]
    assert difference.sd is not None
    assert row.other
    cells = [number_cell("{:.4f}", difference.sd), number_cell("{}", difference.pairs)]
    seconds = [[run.result["seconds"] for run in arm.runs if "seconds" in run.result] for arm in (row.arm, row.other)]
    hours = sum(map(fmean, seconds)) / 3600 if all(seconds) else None
    for needed in (pairs_to_resolve(difference.sd, margin), pairs_to_equate(difference.sd, margin)):
        more = max(0, needed - difference.pairs)
        cells += [number_cell("{:,}", more), number_cell("{:,.1f}", None if hours is None else more * hours)]
    return cells


def _normal(probability: float) -> float:
    """Return the quantile of the standard normal distribution."""
    from scipy.special import ndtri

    return float(ndtri(probability))

"""The numbers that follow from the runs of a study: means, paired differences, their intervals and tests.

They are computed by scipy.stats, not by the code that has made the tables, so that one checks the other.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from warnings import catch_warnings, simplefilter

from simbal.metrics.table import NUMBERS
from simbal.report.reproduce.rows import ArmRows, baseline_of, read_rows, rival
from simbal.report.statistics import holm

SAME = 1e-12  # as a share of the largest value: differences that vary by less vary by rounding alone
ALPHA, POWER = 0.05, 0.8
BETTER = {name: metric.better for metric in NUMBERS for name in (metric.name, metric.key)}
Values = Mapping[int, float]  # by seed


class Paired:
    """Treatment minus baseline on the seeds that both have; or with `ratio`, of logarithms, as a relative change."""

    def __init__(self, treatment: Values, baseline: Values, ratio: bool = False) -> None:
        if ratio:
            treatment, baseline = ({seed: math.log(v) for seed, v in each.items()} for each in (treatment, baseline))
        self.samples, self.ratio = ([*treatment.values()], [*baseline.values()]), ratio
        self.differences = [treatment[seed] - baseline[seed] for seed in sorted(treatment.keys() & baseline.keys())]
        self.largest = max(map(abs, [*treatment.values(), *baseline.values()]), default=0.0)

    @property
    def mean(self) -> float:
        """The mean difference, in percent for a ratio."""
        return self._shown(fmean(self.differences))

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95% interval of the mean, in percent for a ratio."""
        from scipy import stats

        if self._same:
            return self.mean, self.mean
        low, high = stats.ttest_1samp(self.differences, 0).confidence_interval()
        return self._shown(float(low)), self._shown(float(high))

    @property
    def p(self) -> float:
        """The two-sided p of the paired t test; 1 where all differences are the same: no noise was measured."""
        from scipy import stats

        if self._same:
            return 1.0
        return float(stats.ttest_1samp(self.differences, 0).pvalue)

    def equivalence_p(self, margin: float) -> float:
        """The p of two one-sided t tests, the larger: small if the true difference lies within ± `margin`."""
        from scipy import stats

        if math.isinf(margin) or self._same:
            return 1.0
        below = stats.ttest_1samp(self.differences, margin, alternative="less").pvalue
        above = stats.ttest_1samp(self.differences, -margin, alternative="greater").pvalue
        return float(max(below, above))

    @property
    def welch_p(self) -> float:
        """The two-sided p of Welch's t test over all seeds of both; 1 where neither varies."""
        from scipy import stats

        one, other = self.samples
        if max(max(each) - min(each) for each in self.samples) <= SAME * self.largest:
            return 1.0
        with catch_warnings():
            simplefilter("ignore", RuntimeWarning)  # of an arm whose seeds agree: that its variance is 0 is right
            return float(stats.ttest_ind(one, other, equal_var=False).pvalue)

    @property
    def effect(self) -> float:
        """Cohen's d_z."""
        return fmean(self.differences) / stdev(self.differences)

    @property
    def detectable(self) -> float:
        """The true difference that a two-sided paired t test at 5% finds with 80% power, in percent for a ratio."""
        from scipy import optimize, stats

        n = len(self.differences)
        shift = optimize.brentq(lambda shift: _power(shift, n) - POWER, 0, 2 * stats.t.isf(ALPHA / 2, n - 1))
        return self._shown(shift * stdev(self.differences) / math.sqrt(n))

    def pairs(self, difference: float) -> int:
        """The fewest pairs of this spread with which the same test finds a true `difference` above 0 with 80% power."""
        if difference <= 0:
            raise ValueError(f"no number of pairs finds a difference of {difference}: it has to be above 0")
        shift = difference / stdev(self.differences)
        return next(n for n in count(2) if _power(shift * math.sqrt(n), n) >= POWER)

    @property
    def _same(self) -> bool:
        """Whether rounding alone tells the differences apart; `ValueError` for fewer than two, which say nothing."""
        if len(self.differences) < 2:
            raise ValueError(f"{len(self.differences)} pairs have no interval and no p: it takes two")
        return max(self.differences) - min(self.differences) <= SAME * self.largest

    def _shown(self, value: float) -> float:
        return 100 * math.expm1(value) if self.ratio else value


def _power(shift: float, n: int) -> float:
    """Return the chance that a two-sided t test at 5% finds a mean of `shift` standard errors above 0 in n pairs."""
    from scipy import stats

    return float(stats.nct.sf(stats.t.isf(ALPHA / 2, n - 1), n - 1, shift))


class Computed(str):
    """A text that was computed from rows."""


def shown(value: float, digits: str) -> Computed:
    """Return a number in a format such as ".2f"; an exponent without the zeros before it."""
    return Computed(re.sub(r"e([+-])0+(?=\d)", r"e\1", format(value, digits)).replace("e+", "e"))


class Study:
    """The numbers of a study's folder, as its texts ask for them: `significance.diff("ppl", "simbal", "lbl")`.

    Arguments are a number's key, or the last part of it, and the names of arms; `digits` is a format such as ".2f".
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def arms(self) -> Sequence[ArmRows]:
        """The arms of rows.csv, in the order of the table."""
        return read_rows(self._folder) or []

    @cached_property
    def _baseline(self) -> str:
        return baseline_of(self._folder) or ""

    def ranked(self, key: str) -> list[str]:
        """Return the names of the arms that have the number, from the smallest mean to the largest."""
        return sorted((arm.name for arm in self.arms if _of(arm, key)), key=lambda name: self.mean(key, name))

    def mean(self, key: str, arm: str) -> float:
        """Return the mean over the seeds of an arm."""
        return fmean(self._values(key, arm).values())

    def sd(self, key: str, arm: str) -> float:
        """Return the standard deviation over the seeds of an arm."""
        return stdev(self._values(key, arm).values())

    def mean_sd(self, key: str, arm: str, digits: str) -> Computed:
        """Return both as a text: `27.94 ± 1.12`."""
        return Computed(f"{shown(self.mean(key, arm), digits)} ± {shown(self.sd(key, arm), digits)}")

    def least(self, key: str, *arms: str) -> float:
        """Return the smallest value of any run of these arms."""
        return min(value for arm in arms for value in self._values(key, arm).values())

    def most(self, key: str, *arms: str) -> float:
        """Return the largest value of any run of these arms."""
        return max(value for arm in arms for value in self._values(key, arm).values())

    def value(self, key: str, arm: str, seed: int) -> float:
        """Return the value of one run."""
        return self._values(key, arm)[seed]

    def diff(self, key: str, arm: str, baseline: str) -> float:
        """Return the mean paired difference of two arms."""
        return self._paired(key, arm, baseline).mean

    def interval(self, key: str, arm: str, baseline: str, digits: str) -> Computed:
        """Return the 95% interval of that difference as a text: `-1.18 to +2.88`."""
        return Computed(" to ".join(shown(end, digits) for end in self._paired(key, arm, baseline).interval))

    def effect(self, key: str, arm: str, baseline: str) -> float:
        """Return the mean difference in standard deviations of the differences, Cohen's d_z."""
        return self._paired(key, arm, baseline).effect

    def detectable(self, key: str, arm: str, baseline: str) -> float:
        """Return the true difference that so many pairs find with 80% power."""
        return self._paired(key, arm, baseline).detectable

    def pairs(self, key: str, arm: str, baseline: str, difference: float) -> float:
        """Return the fewest pairs of this spread that find a true `difference` with 80% power."""
        return float(self._paired(key, arm, baseline).pairs(difference))

    def conclusion(self, key: str, arm: str, baseline: str, margin: float = math.inf) -> Computed:
        """Return one word, corrected as `p_holm` is.

        Args:
            key: the number; of one that has no better direction, and of an analysis, the word is *lower* or *higher*.
            arm: the arm.
            baseline: the arm that it is compared with.
            margin: within which arms are equivalent, in the number's unit; infinite: none is.
        """
        compared = self._family(key, arm, baseline)
        if arm not in compared:
            return Computed("not resolved")
        place = [*compared].index(arm)
        if holm([paired.p for paired in compared.values()])[place] < ALPHA:
            direction = "lower" if self.diff(key, arm, baseline) < 0 else "higher"
            better = BETTER.get(key, "neither")
            return Computed(direction if better == "neither" else "better" if direction == better else "worse")
        same = holm([paired.equivalence_p(margin) for paired in compared.values()])
        return Computed("equivalent" if same[place] < ALPHA else "not resolved")

    def p_holm(self, key: str, arm: str, baseline: str) -> float:
        """Return the paired t test's p, corrected for all that the table compares; for another pair, for all arms.

        Where arms differ in another key, the table compares each with the baseline's arm of the same.
        """
        compared = self._family(key, arm, baseline)
        return holm([paired.p for paired in compared.values()])[[*compared].index(arm)]

    def lower(self, key: str, arm: str, baseline: str) -> float:
        """Return on how many seeds an arm has the smaller value."""
        return float(sum(difference < 0 for difference in self._paired(key, arm, baseline).differences))

    def agreement(self, key: str, other: "Study") -> float:
        """Return Spearman's correlation of the means of the arms, which are to be the same, with those of `other`."""
        from scipy import stats

        if {arm.name for arm in self.arms} != {arm.name for arm in other.arms}:
            raise ValueError(f"{self._folder.name} and {other._folder.name} have not the same arms")
        ours, theirs = ([study.mean(key, arm.name) for arm in self.arms] for study in (self, other))
        return float(stats.spearmanr(ours, theirs).statistic)

    def _family(self, key: str, arm: str, baseline: str) -> dict[str, Paired]:
        """Return the comparisons by arm over which that of `arm` is corrected: those with two pairs of the number."""
        having = [each for each in self.arms if _of(each, key)]
        found = ((each.name, rival(each, self.arms, self._baseline)) for each in having)
        rivals = {name: other.name for name, other in found if other and _of(other, key)}
        if rivals.get(arm) != baseline:
            rivals = {each.name: baseline for each in having if each.name != baseline}
        compared = {name: self._paired(key, name, other) for name, other in rivals.items()}
        return {name: paired for name, paired in compared.items() if len(paired.differences) > 1}

    def _paired(self, key: str, arm: str, baseline: str) -> Paired:
        return Paired(self._values(key, arm), self._values(key, baseline))

    def _values(self, key: str, arm: str) -> Values:
        found = {each.name: each for each in self.arms}.get(arm)
        if found is None:
            raise ValueError(f"{self._folder.name} has no arm {arm}: there are {', '.join(a.name for a in self.arms)}")
        if not (values := _of(found, key)):
            raise ValueError(f"{arm} of {self._folder.name} has no {key}")
        return values


def _of(arm: ArmRows, key: str) -> Values:
    """Return the number of an arm that has this key, or that has it behind `val/`."""
    return arm.values(key) or arm.values(f"val/{key}")

"""Power and equivalence equal published values and scipy's; the word of a comparison follows from the tests."""

import csv
import json
import math

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from simbal.metrics.definitions import Metric
from simbal.report import sections
from simbal.report.collect import collect
from simbal.report.conclusion import concluded, detectable, equivalence_p, examined, noncentrality
from simbal.report.notes import notes
from simbal.report.report import report
from simbal.report.statistics import interval, paired_difference, summarize
from simbal.report.table import build

LOSS = Metric("loss", "loss", "", better="lower", margin=True)
VALUES = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=9).filter(lambda v: len(set(v)) > 1)


@pytest.mark.parametrize("pairs", [2, 3, 4, 5, 10, 40, 1000])
def test_the_detectable_difference_has_80_percent_power_by_scipys_noncentral_t(pairs):
    shift = detectable(0.058, pairs) * math.sqrt(pairs) / 0.058
    critical = scipy.stats.t.ppf(0.975, pairs - 1)
    assert scipy.stats.nct.sf(critical, pairs - 1, shift) == pytest.approx(0.8, abs=1e-6)


def test_five_pairs_of_our_spread_detect_four_times_the_papers_effect():
    assert detectable(0.058, 5) == pytest.approx(0.0976, abs=1e-4)


def test_many_pairs_need_what_a_normal_test_needs():
    assert noncentrality(10**6) == pytest.approx(scipy.stats.norm.ppf(0.975) + scipy.stats.norm.ppf(0.8), abs=1e-4)


@given(VALUES, st.floats(0.01, 2))
def test_tost_rejects_where_the_90_percent_interval_lies_within_the_margin(values, margin):
    summary = summarize(values)
    error = summary.sd / math.sqrt(summary.n)
    found = equivalence_p(summary.mean, error, summary.n - 1, margin)
    low, high = scipy.stats.t.interval(0.9, summary.n - 1, summary.mean, error)
    assert (found < 0.05) == (-margin < low and high < margin)
    one_sided = [
        scipy.stats.ttest_1samp(values, bound, alternative=side).pvalue
        for bound, side in ((-margin, "greater"), (margin, "less"))
    ]
    assert found == pytest.approx(max(one_sided), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("numbers", [(math.nan, 1, 1), (0, 0, 1), (0, math.inf, 1), (0, 1, 0), (0, 1, -1)])
def test_equivalence_is_of_finite_numbers_with_an_error_and_a_margin(numbers):
    mean, error, margin = numbers
    with pytest.raises(ValueError, match="no test of equivalence has"):
        equivalence_p(mean, error, 4, margin)


def conclusion(differences, better="lower", margin=0.026):
    paired = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    return concluded(examined(paired, LOSS, margin), better)


@pytest.mark.parametrize(
    ("differences", "better", "word"),
    [
        ((-0.05, -0.06, -0.055), "lower", "better"),
        ((-0.05, -0.06, -0.055), "higher", "worse"),
        ((-0.05, -0.06, -0.055), "neither", "lower"),
        ((0.05, 0.06, 0.055), "neither", "higher"),
        ((0.001, -0.002, 0.0015), "lower", "equivalent"),
        ((0.010, 0.011, 0.0105), "lower", "worse"),  # within the margin as well: the clear difference is named
        ((-0.2, 0.1, 0.15), "lower", "not resolved"),
        ((0.3,), "lower", "not resolved"),
        ((0.3, 0.3), "lower", "not resolved"),
    ],
)
def test_the_word_worked_by_hand(differences, better, word):
    assert conclusion(differences, better) == word


def test_a_metric_without_the_margin_and_runs_of_several_margins_are_never_equivalent():
    same = (0.001, -0.002, 0.0015)
    assert conclusion(same, margin=None) == "not resolved"
    paired = paired_difference(dict(enumerate(same)), dict.fromkeys(range(3), 0.0))
    assert examined(paired, Metric("bpb", "", ""), 0.026).p_equivalent is None


@given(VALUES)
def test_a_word_is_better_or_worse_where_the_interval_excludes_zero(values):
    low, high = interval(summarize(values))
    assert (conclusion(values) in ("better", "worse")) == (low > 0 or high < 0)


@pytest.fixture
def sweep(write_run):
    """simbal 5% and lf 2% below lbl in perplexity, with a spread that resolves simbal, and lf only if it is alone."""

    def write(*arms):
        spread = (0.012, -0.012, 0.004, -0.004)
        for name in ("lbl", *arms):
            for seed, noise in enumerate(spread):
                shift = {"lbl": 0.0, "simbal": -0.05 + noise, "lf": -0.02 + noise, "ortho_init": noise / 4}[name]
                run = write_run(name, seed, metrics={"val/ppl": 20 * math.exp(shift), "val/max_vio": 0.5 + noise})
        return run.parent

    return write


def words(table):
    return {row.arm.name: row.differences["val/ppl"].conclusion for row in table.rows if row.differences}


def test_the_word_uses_holms_p_where_several_arms_are_compared(sweep):
    folder = sweep("lf")
    assert words(build("t", collect(folder))) == {"lf": "better"}
    sweep("simbal", "ortho_init")
    table = build("t", collect(folder))
    lf = next(row for row in table.rows if row.arm.name == "lf").differences["val/ppl"]
    assert lf.p < 0.05 < lf.p_holm
    assert words(table) == {"lf": "not resolved", "simbal": "better", "ortho_init": "equivalent"}


def test_p_is_also_corrected_for_arms_that_differ_by_the_same_on_every_seed_but_not_for_single_pairs(sweep, write_run):
    folder = sweep("simbal")  # whose MaxVio differs from lbl's by nothing
    for seed in range(4):
        write_run("lf", seed, metrics={"val/ppl": 21.0, "val/max_vio": 0.6 + 0.01 * seed})
    write_run("ortho_init", 0, metrics={"val/ppl": 22.0, "val/max_vio": 0.7})
    found = {row.arm.name: row.differences for row in build("t", collect(folder)).rows if row.differences}
    tests = [("simbal", "lf", "val/ppl"), ("lf", "simbal", "val/max_vio")]
    for tested, same, key in tests:
        assert found[tested][key].p_holm == pytest.approx(2 * found[tested][key].p)
        assert (found[same][key].p_holm, found[same][key].conclusion) == (None, "not resolved")
        assert (found["ortho_init"][key].p_holm, found["ortho_init"][key].conclusion) == (None, "not resolved")


def test_the_margin_comes_from_the_runs_and_another_may_be_asked_for(sweep):
    folder = sweep("ortho_init")
    assert words(build("t", collect(folder))) == {"ortho_init": "equivalent"}
    strict = build("t", collect(folder), margin=0.001)
    assert words(strict) == {"ortho_init": "not resolved"}
    assert any("less than 0.001 nats per token, a perplexity by 0.1%" in note for note in notes(strict))


def test_runs_of_several_margins_are_told_to_name_one(sweep, write_run):
    folder = sweep("ortho_init")
    write_run("lbl", 9, keys={"equivalence_margin": 0.5})
    table = build("t", collect(folder))
    assert words(table) == {"ortho_init": "not resolved"}
    assert any("choose one with equivalence_margin=" in note for note in notes(table))


def test_every_format_has_the_word_and_what_could_be_detected(sweep):
    folder = sweep("simbal")
    report(folder)
    lines = csv.DictReader((folder / "table.csv").read_text().splitlines())
    (line,) = [line for line in lines if line["detectable"] and line["metric"] == "val/ppl"]
    kept = json.loads((folder / "table.json").read_text())
    difference = kept["arms"][1]["differences"]["val/ppl"]
    assert (line["conclusion"], difference["conclusion"], kept["equivalence_margin"]) == ("better", "better", 0.026)
    assert (
        float(line["detectable"]) == difference["detectable"] == pytest.approx(noncentrality(3) * difference["sd"] / 2)
    )
    shown = sections.differences(build("t", collect(folder)))
    cells = dict(zip(shown.headings, shown.lines[0], strict=True))
    assert cells["conclusion"] == "better"
    assert cells["detectable"] == f"{math.expm1(difference['detectable']):.1%}"
    for file in ("table.md", "table.tex", "index.html"):
        assert "better" in (folder / file).read_text()

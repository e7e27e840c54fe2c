"""The pairs that decide a comparison are those of other programs and of simulated studies; the report prints them."""

import math

import numpy as np
import pytest
import scipy.stats

from simbal.report.collect import collect
from simbal.report.power import equivalence_power, pairs_to_equate, pairs_to_resolve, power_section
from simbal.report.table import build


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_pairs_to_resolve_are_the_fewest_by_scipys_noncentral_t(effect, pairs):
    for count, enough in ((pairs, True), (pairs - 1, False)):
        theirs = scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, count - 1), count - 1, effect * math.sqrt(count))
        assert (theirs >= 0.8) == enough
    assert pairs_to_resolve(1.0, effect) == pairs
    assert pairs_to_resolve(0.058, 0.058 * effect) == pairs


def test_the_power_of_equivalence_is_that_of_powertost():
    """The manual of the R package PowerTOST: a crossover of 40, CV 30%, true ratio 0.95, 80 to 125%: 0.815845."""
    error = math.sqrt(math.log(1 + 0.3**2) * 2 / 40)
    assert equivalence_power(math.log(1.25), error, 38, math.log(0.95)) == pytest.approx(0.815845, abs=1e-5)


def test_the_power_of_equivalence_is_how_often_simulated_studies_find_it():
    generator, pairs, sd, margin = np.random.default_rng(0), 12, 0.058, 0.04
    studies = generator.normal(0.0, sd, (20_000, pairs))
    half = scipy.stats.t.ppf(0.95, pairs - 1) * studies.std(axis=1, ddof=1) / math.sqrt(pairs)
    found = (np.abs(studies.mean(axis=1)) + half < margin).mean()
    expected = equivalence_power(margin, sd / math.sqrt(pairs), pairs - 1)
    assert found == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 20_000))


@pytest.mark.parametrize("margin", [0.026, 0.1, 1.0])
def test_one_pair_less_has_less_than_80_percent(margin):
    equate = pairs_to_equate(0.058, margin)
    for pairs, enough in ((equate, True), (equate - 1, False)):
        if pairs > 1:
            assert (equivalence_power(margin, 0.058 / math.sqrt(pairs), pairs - 1) >= 0.8) == enough


def test_our_spread_and_the_papers_effect_take_about_forty_pairs():
    assert pairs_to_resolve(0.058, 0.026) == 42
    assert pairs_to_equate(0.058, 0.026) == 45


@pytest.fixture
def sweep(write_run):
    def write(*noise):
        for name in ("lbl", "simbal"):
            for seed, shift in enumerate(noise):
                ppl = 20 * math.exp(shift if name == "simbal" else 0.0)
                run = write_run(name, seed, metrics={"val/ppl": ppl, "val/bpb": ppl}, seconds=1800.0)
        return run.parent

    return write


def test_the_section_counts_what_is_missing_in_pairs_and_hours(sweep):
    folder = sweep(-0.058, 0.0, 0.058)  # standard deviation 0.058
    section = power_section(build("t", collect(folder)))
    assert section.lines == [["simbal", "perplexity ↓", "0.0580", "3", "39", "39.0", "42", "42.0"]]

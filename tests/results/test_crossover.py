"""The comparison of hash routing with learned routers over training tokens."""

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from results.tools import crossover
from results.tools.combine import combine
from results.tools.crossover import Place, Point, describe, interval, read_point
from results.tools.verify import check_sums

RESULTS = Path(__file__).parents[2] / "results"
SWEEPS = {"short": (6_000_000, (1,)), "middle": (24_000_000, (1, 2)), "long": (96_000_000, (1, 2, 3))}
OFFSETS = {"lbl": 0.0, "simbal": -0.01, "none": 0.05, "frozen": -0.3, "hash_lbl": -0.4}  # the last two are not learned
SLOPE, ZERO = 0.03, 200_000_000
NOISE = {1: 0.0, 2: 0.004, 3: -0.002}


def gap(tokens):
    return SLOPE * math.log(tokens / ZERO)


def points(differences):
    return [Point(tokens, dict(enumerate(found)), "lbl", 0.0) for tokens, found in differences.items()]


@pytest.fixture
def results(tmp_path):
    """A study with three lengths and two learning rates."""
    study = tmp_path / "study"
    study.mkdir()
    rows = []
    for sweep, (tokens, seeds) in SWEEPS.items():
        for arm, offset in (OFFSETS | {"hash": gap(tokens)}).items():
            for rate in ("0.002", "0.004"):
                for seed in seeds:
                    loss = 3 + offset + NOISE[seed] * (arm == "hash") + float(rate)
                    name = f"{arm} lr={rate}"
                    labels = [sweep, name, arm, f"optim.lr={rate}", seed, f"{arm}-{rate}-{sweep}-{seed}"]
                    rows.append([*labels, loss, tokens])
    with (study / "partial.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["sweep", "arm", "balancing", "setting", "seed", "run", "val/loss", "tokens"])
        lines.writerows(rows)
    (study / "sweep.yaml").write_text("baseline: lbl\ncolumns: [loss]\n")
    combine(study)
    return tmp_path


def test_a_point_is_the_paired_difference_of_one_setting(results):
    point = read_point(results, Place("study", "long", "lr=0.002"))
    assert point.tokens == 96_000_000
    assert point.differences == pytest.approx({seed: gap(96e6) + NOISE[seed] for seed in (1, 2, 3)})
    assert (point.best, point.best_difference) == ("simbal", pytest.approx(point.mean + 0.01))
    assert read_point(results, Place("study", "short", "lr=0.004")).differences == pytest.approx({1: gap(6e6)})


@pytest.mark.parametrize(("sweep", "setting"), [("long", ""), ("", "lr=0.002"), ("longer", "lr=0.002")])
def test_a_point_needs_one_pair_of_arms(results, sweep, setting):
    with pytest.raises(ValueError, match="study='study'"):
        read_point(results, Place("study", sweep, setting))


@pytest.fixture
def other_study(results):
    """A copy of the study with other seeds, in which hash is worse by 1."""
    study = shutil.copytree(results / "study", results / "other")
    for file in ("rows.csv", "partial.csv"):
        rows = [*csv.DictReader((study / file).read_text().splitlines())]
        for row in rows:
            row["seed"] = str(int(row["seed"]) + 3)
            row["val/loss"] = str(float(row["val/loss"]) + (row["balancing"] == "hash"))
        with (study / file).open("w", newline="") as target:
            table = csv.DictWriter(target, [*rows[0]])
            table.writeheader()
            table.writerows(rows)
    return study.name


def test_a_point_joins_the_seeds_of_several_places(results, other_study):
    place = Place("study", "long", "lr=0.002")
    one, joined = read_point(results, place), read_point(results, place, Place(other_study, "long", "lr=0.002"))
    assert joined.differences == pytest.approx(
        one.differences | {seed + 3: found + 1 for seed, found in one.differences.items()}
    )
    assert (joined.tokens, joined.best) == (one.tokens, "simbal")
    assert joined.best_difference == pytest.approx(one.best_difference + 0.5)


def test_places_of_a_point_have_different_seeds_and_equal_tokens(results, other_study):
    place = Place("study", "long", "lr=0.002")
    with pytest.raises(ValueError, match="has a seed that an earlier place has too"):
        read_point(results, place, place)
    with pytest.raises(ValueError, match=r"the runs have \[24000000, 96000000\] tokens"):
        read_point(results, place, Place(other_study, "middle", "lr=0.002"))


def test_intervals_cover_all_points_of_a_line_at_once_although_their_noise_differs():
    draws, misses = np.random.default_rng(0), 0
    for _ in range(1000):
        line = points({tokens: draws.normal(0, noise, 3) for tokens, noise in ((3e6, 0.3), (6e6, 0.1), (24e6, 0.01))})
        misses += any(low > 0 or high < 0 for low, high in (interval(point, line) for point in line))
    assert 30 <= misses <= 60  # Bonferroni: at most 5%, and little less


def test_an_interval_is_that_of_a_paired_t_test_and_needs_three_seeds():
    hashed, learned = [3.1, 3.0, 3.3], [3.0, 3.05, 3.1]
    line = points({6e6: np.subtract(hashed, learned), 24e6: [0.1, 0.2]})
    paired = scipy.stats.ttest_rel(hashed, learned).confidence_interval(0.95)
    assert interval(line[0], line) == pytest.approx((paired.low, paired.high))
    assert interval(line[1], line) == (None, None)


def test_a_sign_change_is_bracketed_and_only_resolved_lengths_are_named():
    means = {3e6: -0.4, 6e6: -0.2, 12e6: -0.001, 24e6: 0.015, 48e6: 0.016}
    found = describe(points({tokens: [1.01 * mean - 0.002, mean, mean + 0.002] for tokens, mean in means.items()}))
    change = "changes sign between 12.0M and 24.0M tokens"
    assert found.startswith(f"{change}; hash is ahead at 3.0M, 6.0M; lbl is ahead at 24.0M, 48.0M; ")
    noisy = describe(points({tokens: [2 * mean - 1, mean, mean + 1] for tokens, mean in means.items()}))
    assert noisy.startswith(f"{change}; not resolved at any length; ")
    same = describe(points({6e6: [0.1], 24e6: [0.2, 0.3]}))
    assert same == "does not change sign; not resolved at any length"


def test_a_change_is_a_paired_t_test_on_the_seeds_that_the_first_and_a_later_length_share():
    first, last = [-0.3, -0.2, -0.4, -0.3], [0.1, 0.3, 0.2]
    line = points({3e6: first, 6e6: [0.0] * 4, 24e6: last, 48e6: [0.5, 0.6]})
    for lines in (1, 2):
        low, high = scipy.stats.ttest_rel(last, first[:3]).confidence_interval(1 - 0.05 / lines)
        change = f"from 3.0M to 24.0M tokens it changes by +0.500 [{low:+.3f}, {high:+.3f}], 3 seeds"
        assert describe(line, lines).split("; ")[-1] == change
    assert "changes by" not in describe(points({3e6: first, 48e6: [0.5, 0.6]}))


def test_points_and_figure_are_written(results, capsys):
    folder = results / "crossover"
    folder.mkdir()
    places = "".join(
        f"\n  - {{study: study, sweep: {sweep}, setting: lr=0.002}}" for sweep in ("long", "short", "middle")
    )
    (folder / "lines.yaml").write_text(f'"D=128, Python":{places}\n')
    crossover.main(folder)
    rows = [*csv.DictReader((folder / "points.csv").read_text().splitlines())]
    assert [(row["tokens"], row["seeds"]) for row in rows] == [("6000000", "1"), ("24000000", "2"), ("96000000", "3")]
    assert [bool(row["low"]) for row in rows] == [False, False, True]
    assert float(rows[0]["mean"]) == pytest.approx(gap(6e6))
    assert capsys.readouterr().out == "D=128, Python: does not change sign; hash is ahead at 96.0M\n"
    assert "D=128, Python" in (folder / "crossover.svg").read_text()
    assert check_sums(results) == []


def test_the_published_points_and_figure_follow_from_the_rows(tmp_path):
    copied = shutil.copytree(RESULTS, tmp_path / "results")
    crossover.main(copied / "crossover")
    for name in ("points.csv", "crossover.svg"):
        assert (copied / "crossover" / name).read_text() == (RESULTS / "crossover" / name).read_text()

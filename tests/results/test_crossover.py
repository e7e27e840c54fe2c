"""The comparison of hash routing with learned routers over training tokens."""

import csv
import math
import shutil

import numpy as np
import pytest
import scipy.stats

from results.tools import crossover
from results.tools.combine import combine
from results.tools.crossover import Place, Point, describe, fit, interval, noise, read_point
from results.tools.verify import check_sums

SWEEPS = {"short": (6_000_000, (1,)), "middle": (24_000_000, (1, 2)), "long": (96_000_000, (1, 2, 3))}
OFFSETS = {"lbl": 0.0, "simbal": -0.01, "none": 0.05, "frozen": -0.3, "hash_lbl": -0.4}  # the last two are not learned
SLOPE, ZERO = 0.03, 200_000_000
NOISE = {1: 0.0, 2: 0.004, 3: -0.002}


def gap(tokens):
    return SLOPE * math.log(tokens / ZERO)


def points(differences):
    return [Point(tokens, tuple(found), "lbl", 0.0) for tokens, found in differences.items()]


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
    assert point.differences == pytest.approx([gap(96e6) + NOISE[seed] for seed in (1, 2, 3)])
    assert (point.best, point.best_difference) == ("simbal", pytest.approx(point.mean + 0.01))
    assert read_point(results, Place("study", "short", "lr=0.004")).differences == pytest.approx([gap(6e6)])


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
    assert joined.differences == pytest.approx([*one.differences, *(found + 1 for found in one.differences)])
    assert (joined.tokens, joined.best) == (one.tokens, "simbal")
    assert joined.best_difference == pytest.approx(one.best_difference + 0.5)


def test_places_of_a_point_have_different_seeds_and_equal_tokens(results, other_study):
    place = Place("study", "long", "lr=0.002")
    with pytest.raises(ValueError, match="has a seed that an earlier place has too"):
        read_point(results, place, place)
    with pytest.raises(ValueError, match=r"the runs have \[24000000, 96000000\] tokens"):
        read_point(results, place, Place(other_study, "middle", "lr=0.002"))


def test_an_exact_crossing_is_found():
    found = fit(points({tokens: [gap(tokens)] * 2 for tokens in (6e6, 24e6, 96e6)}))
    assert found.slope == pytest.approx(SLOPE)
    assert [found.zero, found.low, found.high] == pytest.approx([ZERO] * 3)
    assert found.at(50e6) == pytest.approx(gap(50e6))


@pytest.mark.parametrize("seed", range(5))
def test_the_range_of_a_crossing_is_where_a_line_through_zero_is_not_rejected(seed):
    """Fieller's interval, found here by testing the value of the line at each number of tokens."""
    draws = np.random.default_rng(seed)
    line = points({tokens: gap(tokens) + draws.normal(0, 0.004, 3) for tokens in (6e6, 24e6, 96e6)})
    found = fit(line)
    deviation, degrees = noise(line)
    assert degrees == 6
    design = np.column_stack([np.ones(9), np.repeat(np.log([point.tokens for point in line]), 3)])
    losses = np.concatenate([point.differences for point in line])
    line_fit = np.linalg.solve(design.T @ design, design.T @ losses)

    def t(tokens):
        at = np.array([1, math.log(tokens)])
        return abs(at @ line_fit) / (deviation * math.sqrt(at @ np.linalg.solve(design.T @ design, at)))

    critical = scipy.stats.t.ppf(0.975, degrees)
    assert [t(found.low), t(found.high), t(found.zero)] == pytest.approx([critical, critical, 0], abs=1e-6)
    assert found.low < found.zero < found.high


def test_intervals_cover_all_points_of_a_line_at_once():
    draws, misses = np.random.default_rng(0), 0
    for _ in range(1000):
        line = points({tokens: draws.normal(0, 0.02, seeds) for tokens, seeds in ((6e6, 1), (24e6, 3), (96e6, 3))})
        misses += any(low > 0 or high < 0 for low, high in (interval(point, line) for point in line))
    assert 30 <= misses <= 60  # Bonferroni: at most 5%, and little less


def test_an_early_point_and_a_line_with_little_known_noise_have_no_interval():
    few = points({6e6: [0.1], 24e6: [0.2, 0.3]})
    assert [interval(point, few) for point in few] == [(None, None)] * 2
    line = points({3e6: [-5, 5], 6e6: [0.1, 0.2], 24e6: [0.2, 0.3]})
    assert interval(line[0], line) == (None, None)
    assert [interval(point, line) for point in line[1:]] == [interval(point, line[1:]) for point in line[1:]]


def test_no_crossing_is_claimed_far_beyond_the_runs_or_with_few_lengths():
    near = {tokens: [gap(tokens)] for tokens in (6e6, 24e6, 96e6)}
    same = "does not change sign; "
    found = describe(points(near))
    assert found == f"{same}the fit is zero at 200.0M tokens (no interval: too few seeds)"
    noisy = points({tokens: [mean[0] - 0.1, mean[0] + 0.1] for tokens, mean in near.items()})
    assert describe(noisy) == f"{same}the fit is zero at 200.0M tokens (no interval: the slope may be zero)"
    far = f"{same}the fit is not zero within 4 times the longest run"
    assert describe(points({tokens: [SLOPE * math.log(tokens / 390e6)] for tokens in near})) == far
    assert describe(points({tokens: [-gap(tokens)] for tokens in (6e6, 24e6, 48e6)})) == far
    del near[6e6]
    assert describe(points(near)) == f"{same}no fit with fewer than 3 lengths"


def test_a_crossing_of_a_line_that_is_not_straight_is_only_bracketed():
    means = {3e6: -0.4, 6e6: -0.2, 12e6: -0.01, 24e6: 0.015, 48e6: 0.016}
    found = describe(points({tokens: [mean - 0.002, mean + 0.002] for tokens, mean in means.items()}))
    assert found.startswith("changes sign between 12.0M and 24.0M tokens; not a straight line: the fit is up to 0.")


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
    assert [bool(row["low"]) for row in rows] == [True, True, True]
    assert float(rows[0]["mean"]) == pytest.approx(gap(6e6))
    assert "D=128, Python: does not change sign; the fit is zero at" in capsys.readouterr().out
    assert "D=128, Python" in (folder / "crossover.svg").read_text()
    assert check_sums(results) == []

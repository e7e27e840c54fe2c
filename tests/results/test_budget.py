"""Loss against tuning budget, and the cost of a verdict."""

import csv
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import nct, t

from results.tools import budget
from results.tools.budget import expected_best, pairs_for
from results.tools.combine import MARGIN
from results.tools.figures import read_curves


@pytest.mark.parametrize("points", [1, 2, 5, 7])
def test_the_expected_best_is_the_mean_over_all_subsets(points):
    losses = [3.4, 3.1, 3.9, 3.1, 3.6, 5.0, 3.2]
    assert expected_best(losses, points) == pytest.approx(np.mean([min(kept) for kept in combinations(losses, points)]))


def test_a_diverged_point_counts_until_it_cannot_be_the_best():
    assert expected_best([3.0, float("inf"), 3.2], 1) == float("inf")
    assert expected_best([3.0, float("inf"), 3.2], 2) == pytest.approx((3.0 + 3.0 + 3.2) / 3)


def test_the_pairs_give_the_power_of_a_paired_t_test():
    noise = np.random.default_rng(0).normal(0, 0.02, (2, 8))
    cells = {arm: dict(enumerate(row)) for arm, row in zip(("simbal", "lbl"), (3 + noise).tolist(), strict=True)}
    spread = float(np.std(noise[0] - noise[1], ddof=1))

    def power(pairs):
        critical, shift = t.ppf(0.975, pairs - 1), MARGIN / spread * pairs**0.5
        return 1 - nct.cdf(critical, pairs - 1, shift)

    needed = pairs_for(cells["simbal"], cells["lbl"])
    assert power(needed) >= 0.8 > power(needed - 1)


def test_figure_and_costs_follow_from_the_runs(tmp_path, capsys):
    study = tmp_path / "study"
    study.mkdir()
    rows = []
    for arm, best in (("lbl", 3.0), ("simbal", 3.1)):
        rows += [[f"search_{arm}", arm, 1, best + 0.1 * point, 1_000_000, 9999.0] for point in range(4)]
        rows += [["more", arm, 1, 2.5, 1_000_000, 9999.0]]  # costs, but is no random point
        rows += [[f"second_{arm}", arm, seed, best, 2_000_000, 9999.0] for seed in (2, 3)]
        values = {seed: best + 0.01 * (seed % 3) * (arm == "lbl") for seed in range(4, 12)}
        suspended = {4: 18_000.0}  # seconds of a run
        rows += [
            ["final", arm, seed, loss, 5_000_000, suspended.get(seed, 1800.0), "coef=1"]
            for seed, loss in values.items()
        ]
    rows += [["final", "simbal", seed, 9.0 + seed, 5_000_000, 1800.0, "coef=0"] for seed in (4, 5)]  # another arm
    rows += [["search_hash", "hash", 1, 2.9, 1_000_000, 360.0]]  # trained at one of the four points: no curve
    with (study / "partial.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["sweep", "balancing", "seed", "val/loss", "tokens", "seconds", "setting"], *rows])
    budget.main(study)
    curves = {curve.arm: curve.means for curve in read_curves(study)["budget"]}
    assert set(curves) == {"lbl", "simbal"}
    assert curves["lbl"] == pytest.approx([3.15, float(np.mean([3.0] * 3 + [3.1] * 2 + [3.2])), 3.025, 3.0])
    assert [value - 0.1 for value in curves["simbal"]] == pytest.approx(curves["lbl"])
    first, second = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    pairs, runs, with_search, *arm = first
    assert (arm, second[3:]) == (["simbal", "coef=1"], ["simbal", "coef=0"])
    assert int(second[0]) > int(pairs)
    assert float(runs) == pytest.approx(int(pairs) * 1.0, abs=0.01)  # two runs of half an hour; one was suspended
    search = 2 * (5 * 0.1 + 2 * 0.2)  # hours of both arms, in proportion to tokens
    assert float(with_search) == pytest.approx(float(runs) + search, abs=0.01)
    assert "points tried" in (study / "budget.svg").read_text()

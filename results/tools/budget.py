"""Loss against tuning budget, and the cost of a verdict: python -m results.tools.budget results/equal_search

The sweeps of the study are search_ARM (independent random points), more (further points), second_ARM (the best points
again) and final. The tool writes curves.csv and budget.svg, and prints the cost of comparing each arm with the
baseline. The curves show the arms with the most points: the others were only trained at some of the random points.
Hours are tokens times the median time per token of the final runs, because some runs were suspended.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from math import comb
from pathlib import Path
from statistics import median

from results.tools.combine import MARGIN
from results.tools.figures import redraw
from results.tools.rows import read_csv
from results.tools.verify import write_sums
from simbal.report.curves import arm_styles
from simbal.report.simultaneous import seeds_to_resolve, simultaneous_intervals

BASELINE, SEARCHES, FINAL = "lbl", ("search_", "more", "second_"), "final"


def expected_best(losses: Sequence[float], points: int) -> float:
    """Return the expected lowest loss of `points` of these losses, drawn without replacement.

    For independent points this estimate has no bias (Dodge et al. 2019, arXiv 1909.03004, with replacement there).
    """
    ordered, count = sorted(losses), len(losses)
    chances = [comb(count - place - 1, points - 1) / comb(count, points) for place in range(count)]
    return sum(loss * chance for loss, chance in zip(ordered, chances, strict=True) if chance)


def pairs_for(arm: dict[int, float], baseline: dict[int, float]) -> int:
    """Return the pairs of seeds that detect a difference of `MARGIN` between two arms with 80% power.

    The losses are by seed; the arms share two seeds or more.
    """
    (found,) = simultaneous_intervals({"arm": arm, "baseline": baseline}, [("arm", "baseline")]).values()
    return seeds_to_resolve(found, len(arm.keys() & baseline.keys()), MARGIN)


def main(study: Path) -> None:
    """Write the figure of the search, and print the cost of a verdict."""
    searched: dict[str, list[float]] = {}
    final: dict[tuple[str, str], dict[int, float]] = {}  # by balancing and setting
    search_tokens: Counter[str] = Counter()
    run_tokens, pace = 0.0, []  # of a final run; seconds per token
    for row in read_csv(study / "partial.csv"):
        loss, tokens, sweep, arm = float(row["val/loss"]), float(row["tokens"]), row["sweep"], row["balancing"]
        if sweep == FINAL:
            final.setdefault((arm, row["setting"]), {})[int(row["seed"])] = loss
            run_tokens = tokens
            pace.append(float(row["seconds"]) / tokens)
        elif sweep.startswith(SEARCHES):
            search_tokens[arm] += int(tokens)
            if sweep.startswith(SEARCHES[0]):
                searched.setdefault(arm, []).append(loss)
    points: list[list[object]] = []
    most = max(map(len, searched.values()))
    drawn = [arm for arm, losses in searched.items() if len(losses) == most]
    for arm, style in zip(drawn, arm_styles(drawn), strict=True):
        losses = searched[arm]
        points += [[arm, style, k, expected_best(losses, k), "", ""] for k in range(1, len(losses) + 1)]
    redraw(study, "budget", points)
    write_sums(study.parent)
    hours_per_token = median(pace) / 3600
    (baseline,) = (losses for (arm, _), losses in final.items() if arm == BASELINE)
    print("pairs  hours of the runs  with the search  arm")
    for (arm, setting), losses in final.items():
        if arm != BASELINE and arm in search_tokens:
            pairs = pairs_for(losses, baseline)
            runs = pairs * 2 * run_tokens * hours_per_token
            search = (search_tokens[arm] + search_tokens[BASELINE]) * hours_per_token
            print(f"{pairs:5}{runs:19.2f}{runs + search:17.2f}  {arm} {setting}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

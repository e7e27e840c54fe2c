"""Fit the loss of each arm against compute, and predict the loss at the next size.

python -m results.tools.ladder results/ladder [SIZE]: prints the fit and the prediction for d_model=SIZE (default: 192),
and draws the losses and the fit.
The sweeps of the study are ladder_64, ladder_96, ..., by d_model. The plan of the study defines sizes and fit.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import least_squares

from results.tools.figures import redraw
from results.tools.rows import read_rows
from results.tools.verify import write_sums
from simbal.report.curves import arm_styles

LAYERS, EXPERTS, TOP_K, BATCH = 3, 16, 2, 4096  # the last in tokens
RESAMPLES, SEED = 2000, 0
Losses = Mapping[str, Mapping[int, Mapping[int, float]]]  # by arm, size and seed


def active_parameters(size: int) -> int:
    """Return the active parameters, without embedding and head, of the model of width `size`."""
    attention, experts, router, norms = 4 * size**2, 3 * TOP_K * size**2, EXPERTS * size, 2 * size
    return LAYERS * (attention + experts + router + norms) + size


def steps(size: int) -> int:
    """Return the optimizer steps for 20 tokens per active parameter."""
    return round(20 * active_parameters(size) / BATCH)


def compute(size: int) -> float:
    """Return the FLOPs of a run, 6 per active parameter and token."""
    return 6.0 * active_parameters(size) * steps(size) * BATCH


class Fit:
    """loss = L + A_arm C^-a, with C the compute; L and a are common to the arms."""

    def __init__(self, means: Mapping[str, Mapping[int, float]]) -> None:
        """Fit the mean losses, by arm and size, by least squares."""
        self.arms, self.unit = [*means], compute(min(size for found in means.values() for size in found))
        points = [(place, size, loss) for place, arm in enumerate(self.arms) for size, loss in means[arm].items()]
        arm_P, size_P, loss_P = (np.array(column) for column in zip(*points, strict=True))
        compute_P = np.array([compute(size) / self.unit for size in size_P])

        def residuals(parameters: np.ndarray) -> np.ndarray:
            floor, exponent, scale_A = parameters[0], parameters[1], parameters[2:]
            return floor + scale_A[arm_P] * compute_P**-exponent - loss_P

        start = [0.5 * loss_P.min(), 0.1, *(max(means[arm].values()) - 0.5 * loss_P.min() for arm in self.arms)]
        lower = [0.0, 0.0, *(0.0 for _ in self.arms)]
        found = least_squares(residuals, start, bounds=(lower, np.inf), x_scale="jac", xtol=1e-12, ftol=1e-12)
        self.floor, self.exponent, self.scales = found.x[0], found.x[1], dict(zip(self.arms, found.x[2:], strict=True))

    def loss(self, arm: str, size: int) -> float:
        """Return the loss of an arm at a size."""
        return float(self.floor + self.scales[arm] * (compute(size) / self.unit) ** -self.exponent)


def mean_losses(losses: Losses, seeds: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return the means over seeds, which may repeat."""
    return {
        arm: {size: float(np.mean([found[seed] for seed in seeds])) for size, found in by_size.items()}
        for arm, by_size in losses.items()
    }


def predict(losses: Losses, size: int) -> dict[str, tuple[float, float, float]]:
    """Return each arm's predicted loss at a size, with the 2.5 to 97.5% range over resamples of seeds."""
    seeds = seeds_of(losses)
    drawn = np.sort(np.random.default_rng(SEED).choice(seeds, (RESAMPLES, len(seeds))))
    different, counts = np.unique(drawn, axis=0, return_counts=True)
    resamples = [Fit(mean_losses(losses, row.tolist())) for row in different]
    best = Fit(mean_losses(losses, seeds))
    found = {}
    for arm in best.arms:
        values = np.repeat([fit.loss(arm, size) for fit in resamples], counts)
        found[arm] = (best.loss(arm, size), *map(float, np.quantile(values, [0.025, 0.975])))
    return found


def read_losses(study: Path) -> Losses:
    """Return the final losses of the sweeps `ladder_<size>`, by arm, size and seed."""
    losses: dict[str, dict[int, dict[int, float]]] = {}
    for arm in read_rows(study).values():
        size = arm.setting.rpartition("sweep=ladder_")[2]
        if size.isdigit():
            losses.setdefault(arm.balancing, {})[int(size)] = arm.values("val/loss")
    return losses


def seeds_of(losses: Losses) -> list[int]:
    """Return all seeds."""
    return sorted({seed for by_size in losses.values() for found in by_size.values() for seed in found})


def main(study: Path, size: int = 192) -> None:
    """Print the fit to the smaller sizes and the predictions as JSON, and draw them with all losses."""
    measured = read_losses(study)
    losses = {arm: {d: found for d, found in sizes.items() if d < size} for arm, sizes in measured.items()}
    fit = Fit(mean_losses(losses, seeds_of(losses)))
    predictions = {
        arm: {"loss": loss, "low": low, "high": high} for arm, (loss, low, high) in predict(losses, size).items()
    }
    found = {"floor": fit.floor, "exponent": fit.exponent, "d_model": size, "predictions": predictions}
    print(json.dumps(found, indent=1))
    means = {arm: {d: fmean(by_seed.values()) for d, by_seed in sizes.items()} for arm, sizes in measured.items()}
    largest = max(map(max, losses.values()))
    for arm in [arm for arm, sizes in losses.items() if largest in sizes]:
        means[f"{arm}, fit"] = {d: fit.loss(arm, d) for d in sorted({*losses[arm], size})}
    redraw(study, "ladder", [
        [arm, style, compute(d), loss, "", ""]
        for (arm, sizes), style in zip(means.items(), arm_styles([*means]), strict=True)
        for d, loss in sorted(sizes.items())
    ])  # fmt: skip
    write_sums(study.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

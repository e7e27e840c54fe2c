"""The ladder's fit recovers known parameters, and its sizes match the models."""

import json

import numpy as np
import pytest

from results.tools import ladder
from results.tools.figures import read_curves
from results.tools.ladder import BATCH, Fit, active_parameters, compute, mean_losses, predict, steps
from simbal.cost import parameters
from simbal.training.build import transformer_shape
from tests.conftest import CONF

FLOOR, EXPONENT, SCALES = 2.0, 0.15, {"lbl": 1.5, "hash": 1.4, "frozen": 1.6}


def loss(arm, size):
    return FLOOR + SCALES[arm] * (compute(size) / compute(64)) ** -EXPONENT


def test_an_exact_power_law_is_found_and_continued():
    fit = Fit({arm: {size: loss(arm, size) for size in (64, 96, 128)} for arm in SCALES})
    assert (fit.floor, fit.exponent) == pytest.approx((FLOOR, EXPONENT), rel=1e-3)
    assert [fit.loss(arm, 192) for arm in SCALES] == pytest.approx([loss(arm, 192) for arm in SCALES], abs=1e-5)


def test_the_range_of_a_prediction_has_the_size_of_its_noise():
    noise = np.random.default_rng(1)
    losses = {
        arm: {size: {seed: loss(arm, size) + noise.normal(0, 0.005) for seed in (60, 61, 62)} for size in (64, 96, 128)}
        for arm in SCALES
    }
    predicted, low, high = predict(losses, 192)["lbl"]
    assert low <= predicted <= high
    assert 0.001 < high - low < 0.1
    assert predicted == pytest.approx(loss("lbl", 192), abs=0.03)
    assert mean_losses(losses, [60, 60])["lbl"][64] == pytest.approx(losses["lbl"][64][60])


@pytest.mark.parametrize("size", [64, 192])
def test_sizes_match_the_models_and_the_plan(size, small_spec):
    keys = (f"model.d_model={size}", f"model.d_expert={size}", f"model.num_heads={size // 32}", "model.num_layers=3")
    shape = transformer_shape(
        small_spec(*keys, "model.num_experts=16", "model.top_k=2", "model.tie_embeddings=false"), 0
    )
    found = parameters(shape)
    assert active_parameters(size) == found.without_embedding - shape.vocab_size * size  # nor the head
    assert abs(steps(size) * BATCH - 20 * active_parameters(size)) < BATCH
    plan = (CONF.parent / "results/ladder/plan.md").read_text()
    assert f"| {size} | {active_parameters(size):,} | {steps(size) * BATCH:,} | {steps(size):,} |" in plan


def test_losses_and_fit_are_drawn(tmp_path, capsys):
    study = tmp_path / "ladder"
    study.mkdir()
    rows = [
        f"{arm} sweep=ladder_{size},{arm},sweep=ladder_{size},{seed},{arm}-{size}-{seed},{loss(arm, size)}"
        for arm, sizes in {"lbl": (64, 96, 128, 192), "hash": (64, 96, 128), "frozen": (64, 96)}.items()
        for size in sizes
        for seed in (60, 61)
    ]
    (study / "rows.csv").write_text("\n".join(["arm,balancing,setting,seed,run,val/loss", *rows]))
    ladder.main(study)
    predicted = json.loads(capsys.readouterr().out)["predictions"]
    assert predicted["lbl"]["loss"] == pytest.approx(loss("lbl", 192), abs=1e-4)
    curves = {curve.arm: dict(zip(curve.xs, curve.means, strict=True)) for curve in read_curves(study)["ladder"]}
    assert curves.keys() == {*SCALES, "lbl, fit", "hash, fit"}  # frozen was not trained at the largest size of the fit
    assert curves["frozen"] == {compute(size): pytest.approx(loss("frozen", size)) for size in (64, 96)}
    assert curves["lbl"] == pytest.approx(curves["lbl, fit"], abs=1e-4)  # the last point is the prediction
    assert curves["hash, fit"][compute(192)] == pytest.approx(predicted["hash"]["loss"])

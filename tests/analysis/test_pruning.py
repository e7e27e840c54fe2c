"""The analysis `pruning`."""

import math

import pytest
import scipy.stats
import torch

from simbal.analysis import pruning as pruning_module
from simbal.analysis.pruning import Pruning, geometric_mean, kept_plan, pruning
from simbal.analysis.quality import quality
from simbal.experts.backends import RoutingPlan
from simbal.experts.select import BACKENDS

WEIGHTS_NK = torch.tensor([[4 / 7, 3 / 7], [0.625, 0.375], [4 / 7, 3 / 7], [4 / 7, 3 / 7]])
KEYS = {"rule": "absolute", "renorm_after": False, "allow_none": False, "repeats": 2}


def absolute(threshold, renorm_after=False, allow_none=False):
    return Pruning(threshold, "absolute", renorm_after, allow_none)


SIGMOID = ("router.gating=sigmoid", "router.renormalize=false")


def test_kept_weights_change_only_with_renorm_after():
    kept_NK = absolute(0.45).kept(WEIGHTS_NK)
    assert kept_NK.tolist() == [[True, False]] * 4
    assert absolute(0.45).weights(WEIGHTS_NK, kept_NK)[0].tolist() == pytest.approx([0.571429, 0], abs=1e-6)
    assert absolute(0.45, renorm_after=True).weights(WEIGHTS_NK, kept_NK)[0].tolist() == pytest.approx([1, 0])


def test_the_relative_rule_compares_with_the_largest_weight():
    relative = Pruning(0.7, "relative", False, False)
    assert relative.kept(WEIGHTS_NK).tolist() == [[True, True], [True, False], [True, True], [True, True]]


def test_the_expert_with_the_largest_weight_is_kept_unless_allow_none():
    weights_NK = WEIGHTS_NK.flip(1)  # with a bias, choices are not sorted by weight
    assert absolute(0.9).kept(weights_NK).tolist() == [[False, True]] * 4
    assert not absolute(0.9, allow_none=True).kept(weights_NK).any()


def test_thresholds_apply_to_weights_divided_by_their_sum():
    assert torch.equal(absolute(0.4).kept(WEIGHTS_NK / 8), absolute(0.4).kept(WEIGHTS_NK))
    assert absolute(0).kept(torch.zeros(1, 2)).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_plan_of_the_kept_choices_sums_over_them(backend):
    generator = torch.Generator().manual_seed(0)
    x_ND, w13, w2 = (torch.randn(size, generator=generator) for size in ((6, 8), (5, 2, 4, 8), (5, 4, 8)))
    experts_NK = torch.rand(6, 5, generator=generator).argsort(1)[:, :3]
    weights_NK = torch.rand(6, 3, generator=generator)
    kept_NK = torch.rand(6, 3, generator=generator) > 0.6
    left_NK = weights_NK.masked_fill(~kept_NK, 0)
    plan = kept_plan(experts_NK, left_NK, kept_NK, 5)
    assert len(plan.order_R) == kept_NK.sum()
    usual = RoutingPlan.build(experts_NK, left_NK, 5)
    run = BACKENDS[backend].run
    torch.testing.assert_close(run(x_ND, plan, w13, w2), BACKENDS["reference"].run(x_ND, usual, w13, w2))


@pytest.mark.parametrize("overrides", [(), ("experts=reference",), SIGMOID], ids=["torch", "reference", "sigmoid"])
def test_threshold_zero_is_the_unchanged_run_to_the_bit(trained, overrides):
    run = trained("balancing=lf_lbl", *overrides)
    record = pruning(run, 160, 3, [0.5, 0], **KEYS).record
    expected = quality(run, 160, 3, resamples=2, seed=0).record
    for arm in ("plain", "0"):
        assert record["arms"][arm]["loss"] == expected["metrics"]["loss"]
        assert record["metrics"][f"experts_prune_{arm}"] == 2
    assert record["tokens"] == expected["tokens"]
    assert record["metrics"]["experts_prune_0.5"] == pytest.approx(1, abs=0.01)  # ties keep both
    assert record["metrics"]["ppl_prune_0.5"] != record["metrics"]["ppl_prune_0"]


def test_the_interval_of_ratios_equals_scipys_for_their_logarithms():
    ratios = [0.93, 1.02, 0.88, 0.97]
    low, high = scipy.stats.ttest_1samp([math.log(ratio) for ratio in ratios], 0).confidence_interval()
    assert geometric_mean(ratios) == pytest.approx((scipy.stats.gmean(ratios), math.exp(low), math.exp(high)))
    assert geometric_mean([0.5]) == (pytest.approx(0.5), None, None)


@pytest.mark.parametrize(("slower", "expected"), [(1.0, True), (0.5, False)])
def test_a_ratio_whose_interval_contains_1_is_reported_as_noise(trained, monkeypatch, slower, expected):
    noise = iter([1.0, 1.1, 0.9, 1.05] * 10)
    real = pruning_module.run_pass

    def timed(subject, tokens, batch_size, arm):
        real(subject, tokens, batch_size, arm)
        arm.seconds[-1] = next(noise) * (slower if arm.name == "0.5" else 1)

    monkeypatch.setattr(pruning_module, "run_pass", timed)
    result = pruning(trained("balancing=lf_lbl"), 16, 16, [0.5], **KEYS | {"repeats": 4})
    low, high = (result.record["metrics"][f"time_ratio_{end}_prune_0.5"] for end in ("low", "high"))
    assert (low < 1 < high) is expected
    assert [*result.tables[0].columns[-1].cells] == ["", "below the noise" if expected else ""]

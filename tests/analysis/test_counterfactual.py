"""The analysis `counterfactual`."""

import math

import pytest
import torch

from simbal.analysis.counterfactual import RandomSets, compare, counterfactual, standard_error
from simbal.analysis.quality import quality
from simbal.analysis.trained import load
from simbal.model.router import Candidates, Router, Steering

KEYS = {"tokens": 256, "batch_size": 4, "draws": 2, "resamples": 200, "seed": 0}


class Biased(Steering):
    """A strategy that adds a bias to the choice."""

    def __init__(self, bias_E=0.0):
        self.bias_E = bias_E

    def choice_scores(self, candidates):
        return candidates.logits_NE + self.bias_E


@pytest.fixture
def run(trained):
    """A run whose experts are always 0 and 1 because of a bias. Tests may modify its weights."""
    fresh = load(trained("balancing=lf").path)
    bias_LE = fresh.module.balancing.parts["lf"].bias_LE
    bias_LE.copy_(torch.tensor([1e3, 1e3, 0, 0]).expand_as(bias_LE))
    return fresh


def test_random_sets_are_uniform_over_all_sets_except_the_chosen_one():
    tokens_BS = torch.randint(1000, (8, 1000), generator=torch.Generator().manual_seed(0))
    logits_NE = torch.randn(8000, 4, generator=torch.Generator().manual_seed(1))
    candidates = Candidates(0, tokens_BS, logits_NE, logits_NE.softmax(1), 2)
    always = Biased(torch.tensor([99.0, 0, 99.0, 0]))
    scores_NE = RandomSets(always, 0, 2, seed=0, draw=0).choice_scores(candidates)
    sets, counts = scores_NE.topk(2).indices.sort(1).values.unique(dim=0, return_counts=True)
    assert sets.tolist() == [[0, 1], [0, 3], [1, 2], [1, 3], [2, 3]]
    expected, sd = 8000 / 5, math.sqrt(8000 * 1 / 5 * 4 / 5)
    assert (counts - expected).abs().max() < 4 * sd


@pytest.mark.parametrize("renormalize", [True, False])
def test_random_experts_are_weighted_by_the_routers_own_rule(renormalize):
    probs_4 = torch.tensor([0.4, 0.3, 0.2, 0.1])
    router = Router(4, 4, 2, "softmax", renormalize, layer=0)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(4))
        x_ND = probs_4.log().expand(6, 4)
        routing = router(x_ND, torch.zeros(1, 6, dtype=torch.int64), RandomSets(Biased(), 0, 2, seed=0, draw=0))
    for experts, weights in zip(routing.topk_experts_NK, routing.topk_probs_NK, strict=True):
        assert set(experts.tolist()) != {0, 1}
        own = probs_4[experts]
        torch.testing.assert_close(weights, own / own.sum() if renormalize else own)


def test_gain_and_regret_match_hand_calculation():
    chosen_N, documents_N = torch.tensor([2.1, 0.2], dtype=torch.float64), torch.tensor([0, 2])
    random_DN = torch.tensor([[1.7, 0.25], [2.5, 0.3]], dtype=torch.float64)
    numbers, gain_G = compare(chosen_N, random_DN, documents_N)
    expected = {"regret": (0.4 + 0) / 2, "random_loss": (2.1 + 0.275) / 2, "gain": (0 + 0.075) / 2}
    assert numbers == pytest.approx(expected)
    assert gain_G.tolist() == pytest.approx([0, 0, 0.075])


def test_the_standard_error_is_that_of_a_ratio_over_documents():
    rng = torch.Generator().manual_seed(0)
    documents_N = torch.randint(40, (3000,), generator=rng) * 2  # every second document has tokens
    gain_N = torch.randn(3000, generator=rng).double() + torch.randn(80, generator=rng).double()[documents_N]
    gain_G = torch.zeros(80).double().index_add(0, documents_N, gain_N)
    tokens_G = torch.bincount(documents_N, minlength=80)
    rest_G = (gain_G - gain_N.mean() * tokens_G)[::2]
    expected = math.sqrt(40 / 39 * rest_G.square().sum().item()) / 3000
    assert standard_error(gain_G, documents_N, 2000, 0) == pytest.approx(expected, rel=0.1)
    documents_N = torch.tensor([49, 49, 50, 50])  # a resample of documents without tokens would divide by 0
    assert standard_error(torch.ones(60).double(), documents_N, 200, 0) == pytest.approx(0)


@torch.no_grad()
def test_a_router_that_avoids_bad_experts_gains_only_in_their_layer(run):
    """All tokens go to experts 0 and 1. In layer 1 the others are noise, in layer 0 they are equally good."""
    first, second = run.model.feed_forwards
    first.w13_E2FD[:], first.w2_EFD[:] = first.w13_E2FD[:1].clone(), first.w2_EFD[:1].clone()
    second.w2_EFD[2:] = torch.randn(second.w2_EFD[2:].shape, generator=torch.Generator().manual_seed(0)) * 100
    record = counterfactual(run, **KEYS).record
    metrics, gains, errors = record["metrics"], record["layers"]["gain"], record["layers"]["gain_se"]
    assert gains[0] == pytest.approx(0, abs=1e-5)
    assert gains[1] > 10 * errors[1] > 0
    assert (metrics["gain"], metrics["gain_se"]) == pytest.approx((sum(gains) / 2, errors[1] / 2), rel=1e-3)
    assert record["layers"]["random_loss"][1] == pytest.approx(metrics["loss"] + gains[1])


@pytest.mark.parametrize("strategy", ["lbl", "logit_norm"])
def test_the_loss_equals_the_loss_of_quality_at_any_batch_size(trained, strategy):
    run = trained(f"balancing={strategy}")
    result = counterfactual(run, **KEYS)
    record = result.record
    assert record["metrics"]["loss"] == quality(run, 256, 4, 2, 0).record["metrics"]["loss"]
    assert record["tokens"] == 256
    other = counterfactual(run, **KEYS | {"batch_size": 7}).record
    assert other["layers"]["random_loss"] == pytest.approx(record["layers"]["random_loss"], rel=1e-6)
    assert other["layers"]["regret"] == pytest.approx(record["layers"]["regret"], rel=1e-2)
    assert f"{record['documents']} documents are too small" in result.notes[2]

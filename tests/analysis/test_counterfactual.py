"""Other experts than a router chose: how they are drawn and weighed, and what is worth what in models made for it."""

import json
import math

import pytest
import torch

from simbal.analysis.counterfactual import OtherSets, compared, counterfactual, standard_error
from simbal.analysis.quality import quality
from simbal.analysis.trained import load
from simbal.model.router import Candidates, Router, Steering
from tests.analysis.module_runs import trained_run

KEYS = {"tokens": 256, "batch_size": 4, "draws": 2, "resamples": 200, "seed": 0}


class Plain(Steering):
    """A strategy that adds a bias to the choice."""

    def __init__(self, bias_E=0.0):
        self.bias_E = bias_E

    def choice_scores(self, candidates):
        return candidates.logits_NE if isinstance(self.bias_E, float) else candidates.logits_NE + self.bias_E


@pytest.fixture(scope="module")
def path(tmp_path_factory, cache_dir):
    """The path of a run whose experts are always 0 and 1, by a bias on the choice."""
    return trained_run(tmp_path_factory, cache_dir, "balancing=lf", "trainer.max_steps=4").path


@pytest.fixture
def run(path):
    """The same run anew for each test, which may change its weights."""
    fresh = load(path)
    bias_LE = fresh.module.balancing.parts["lf"].bias_LE
    bias_LE.copy_(torch.tensor([1e3, 1e3, 0, 0]).expand_as(bias_LE))
    return fresh


def candidates_of(tokens_BS, layer=0):
    logits_NE = torch.randn(tokens_BS.numel(), 4, generator=torch.Generator().manual_seed(1))
    return Candidates(layer, tokens_BS, logits_NE, logits_NE.softmax(1), 2)


def sets_of(scores_NE):
    return scores_NE.topk(2).indices.sort(1).values


def test_sets_are_uniform_over_all_but_the_routed_one():
    tokens_BS = torch.randint(1000, (8, 1000), generator=torch.Generator().manual_seed(0))
    always = Plain(torch.tensor([99.0, 0, 99.0, 0]))
    drawn_N2 = sets_of(OtherSets(always, 0, 2, seed=0, draw=0).choice_scores(candidates_of(tokens_BS)))
    sets, counts = drawn_N2.unique(dim=0, return_counts=True)
    assert sets.tolist() == [[0, 1], [0, 3], [1, 2], [1, 3], [2, 3]]
    expected, spread = 8000 / 5, math.sqrt(8000 * 1 / 5 * 4 / 5)
    assert (counts - expected).abs().max() < 4 * spread


@pytest.mark.parametrize("renormalize", [True, False])
def test_drawn_experts_are_weighed_by_the_routers_own_rule(renormalize):
    probs_4 = torch.tensor([0.4, 0.3, 0.2, 0.1])
    router = Router(4, 4, 2, "softmax", renormalize, layer=0)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(4))
        x_ND = probs_4.log().expand(6, 4)
        routing = router(x_ND, torch.zeros(1, 6, dtype=torch.int64), OtherSets(Plain(), 0, 2, seed=0, draw=0))
    for experts, weights in zip(routing.topk_experts_NK, routing.topk_probs_NK, strict=True):
        assert set(experts.tolist()) != {0, 1}
        own = probs_4[experts]
        torch.testing.assert_close(weights, own / own.sum() if renormalize else own)


def test_gain_and_regret_of_stated_losses():
    routed_N, documents_N = torch.tensor([2.1, 0.2], dtype=torch.float64), torch.tensor([0, 2])
    drawn = [torch.tensor(losses, dtype=torch.float64) for losses in ([1.7, 0.25], [2.5, 0.3])]
    found = compared(routed_N, iter(drawn), documents_N)
    assert found.regret == pytest.approx((0.4 + 0) / 2)
    assert found.random_loss == pytest.approx((2.1 + 0.275) / 2)
    assert found.gain == pytest.approx((0 + 0.075) / 2)
    assert found.gain_G.tolist() == pytest.approx([0, 0, 0.075])


def test_the_standard_error_is_that_of_a_ratio_over_documents():
    draws = torch.Generator().manual_seed(0)
    documents_N = torch.randint(40, (3000,), generator=draws) * 2  # every second document has tokens
    gain_N = torch.randn(3000, generator=draws).double() + torch.randn(80, generator=draws).double()[documents_N]
    gain_G = torch.zeros(80).double().index_add(0, documents_N, gain_N)
    tokens_G = torch.bincount(documents_N, minlength=80)
    rest_G = (gain_G - gain_N.mean() * tokens_G)[::2]
    expected = math.sqrt(40 / 39 * rest_G.square().sum().item()) / 3000
    assert standard_error(gain_G, documents_N, 2000, 0) == pytest.approx(expected, rel=0.1)
    documents_N = torch.tensor([49, 49, 50, 50])  # those without tokens are never drawn alone
    assert standard_error(torch.ones(60).double(), documents_N, 200, 0) == pytest.approx(0)


@torch.no_grad()
def test_experts_that_are_all_alike_make_every_choice_worth_nothing(run):
    for layer in run.model.feed_forwards:
        layer.w13_E2FD[:] = layer.w13_E2FD[:1].clone()
        layer.w2_EFD[:] = 30 * layer.w2_EFD[:1].clone()
    record = counterfactual(run, **KEYS).record
    assert record["layers"]["gain"] == pytest.approx([0, 0], abs=1e-5)
    assert record["layers"]["regret"] == pytest.approx([0, 0], abs=1e-4)


@torch.no_grad()
def test_a_router_that_keeps_off_bad_experts_gains_in_their_layer_alone(run):
    """All tokens go to the experts 0 and 1; in layer 1 the others are noise, in layer 0 as good as the rest."""
    first, second = run.model.feed_forwards
    first.w13_E2FD[:], first.w2_EFD[:] = first.w13_E2FD[:1].clone(), first.w2_EFD[:1].clone()
    second.w2_EFD[2:] = torch.randn(second.w2_EFD[2:].shape, generator=torch.Generator().manual_seed(0)) * 100
    record = counterfactual(run, **KEYS).record
    gains, errors = record["layers"]["gain"], record["layers"]["gain_se"]
    assert gains[0] == pytest.approx(0, abs=1e-5)
    assert gains[1] > 10 * errors[1] > 0
    assert record["metrics"]["gain"] == pytest.approx(sum(gains) / 2)
    assert record["metrics"]["gain_se"] == pytest.approx(errors[1] / 2, rel=1e-3)
    assert record["layers"]["random_loss"][1] == pytest.approx(record["metrics"]["loss"] + gains[1])


def test_a_router_that_draws_its_experts_knows_nothing(tmp_path_factory, cache_dir):
    many = ("data.documents=128", "data.validation_one_in=4")  # held-out ones, so that their spread is known
    run = trained_run(tmp_path_factory, cache_dir, "balancing=uniform", *many)
    with torch.no_grad():
        for layer in run.model.feed_forwards:
            layer.w2_EFD *= 30  # so that it matters who is chosen
    finding = counterfactual(run, **KEYS | {"tokens": None, "batch_size": 64})
    record = finding.record
    assert record["documents"] >= 30
    assert len(finding.notes) == 2
    for gain, error in zip(record["layers"]["gain"], record["layers"]["gain_se"], strict=True):
        assert abs(gain) < 4 * error
        assert error > 1e-4
    assert all(regret > 0 for regret in record["layers"]["regret"])  # best of many, although it knows nothing


@pytest.mark.parametrize("strategy", ["lbl", "logit_norm"])
def test_a_run_has_the_loss_of_its_quality_and_numbers_that_no_batch_decides(tmp_path_factory, cache_dir, strategy):
    run = trained_run(tmp_path_factory, cache_dir, f"balancing={strategy}", "trainer.max_steps=4")
    finding = counterfactual(run, **KEYS)
    record = finding.record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["metrics"]["loss"] == quality(run, 256, 4, 2, 0).record["metrics"]["loss"]
    assert record["tokens"] == 256
    assert 1 < record["documents"] <= len(run.validation.document_ends)
    other = counterfactual(run, **KEYS | {"batch_size": 7}).record
    assert other["layers"]["random_loss"] == pytest.approx(record["layers"]["random_loss"], rel=1e-6)
    assert other["layers"]["regret"] == pytest.approx(record["layers"]["regret"], rel=1e-2)
    of_a_random_set = record["metrics"]["regret"] + record["metrics"]["gain"]
    assert f"a random set's is {of_a_random_set:.5f}" in finding.notes[1]
    assert finding.notes[2].startswith(f"Standard errors over {record['documents']} documents are too small")

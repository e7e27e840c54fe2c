"""Dropping masks what the run would have chosen first, and changes nothing else."""

import math

import pytest
import torch

from simbal.analysis.dropping import Dropping, dropping
from simbal.analysis.quality import quality
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Steering, topk_indices
from tests.analysis.module_runs import trained_run

PROBS_NE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]])


class Plain(Steering):
    """A strategy that adds a bias to the choice and halves the logits."""

    def __init__(self, bias_E=0.0, factor=1.0):
        self.bias_E, self.factor = bias_E, factor

    def adjust_logits(self, logits_NE):
        return self.factor * logits_NE

    def choice_scores(self, candidates):
        return candidates.logits_NE + self.bias_E


@pytest.fixture(scope="module", params=["lbl", "lf", "uniform", "logit_norm"])
def trained(request, tmp_path_factory, cache_dir):
    return trained_run(tmp_path_factory, cache_dir, f"balancing={request.param}")


def route(steering):
    router = Router(4, 4, 2, "softmax", renormalize=True, layer=0)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(4))
        return router(PROBS_NE.log(), torch.zeros(2, 2, dtype=torch.int64), steering)


def test_without_its_best_expert_a_token_takes_the_next_with_the_routers_own_weights():
    routing = route(Dropping(Plain(), 1))
    assert routing.topk_experts_NK[0].tolist() == [1, 2]
    assert routing.topk_probs_NK[0].tolist() == pytest.approx([0.6, 0.4])
    routing = route(Dropping(Plain(), 2))
    assert routing.topk_experts_NK.tolist() == [[2, 3], [1, 3], [1, 0], [3, 2]]


def test_what_is_best_is_what_the_strategy_would_choose():
    bias_E = torch.tensor([0.0, 0.0, 0.0, 10.0])
    assert route(Plain(bias_E)).topk_experts_NK[0].tolist() == [3, 0]
    routing = route(Dropping(Plain(bias_E), 1))
    assert routing.topk_experts_NK[0].tolist() == [0, 1]
    assert routing.topk_probs_NK[0].tolist() == pytest.approx([4 / 7, 3 / 7])


def test_adjusted_logits_are_passed_on():
    routing = route(Dropping(Plain(factor=0.5), 1))
    torch.testing.assert_close(routing.logits_NE, PROBS_NE.log() / 2)


def test_ties_are_dropped_in_the_order_in_which_they_would_be_chosen():
    scores_NE = torch.zeros(1, 4)
    candidates = Candidates(0, torch.zeros(1, 1).long(), scores_NE, scores_NE.softmax(1), 2)
    left_NE = Dropping(Plain(), 2).choice_scores(candidates)
    assert left_NE.tolist() == [[-math.inf, -math.inf, 0, 0]]
    assert topk_indices(left_NE, 2).tolist() == [[2, 3]]


def test_dropping_none_is_the_run_as_it_is_to_the_bit(trained):
    record = dropping(trained, 160, 3, None).record
    assert [point["drop"] for point in record["curve"]] == [0, 1, 2]
    expected = quality(trained, 160, 3, resamples=2, seed=0).record
    assert record["curve"][0]["loss"] == expected["metrics"]["loss"]
    assert record["metrics"]["ppl_drop_0"] == expected["metrics"]["ppl"]
    assert record["tokens"] == expected["tokens"]
    assert len({point["loss"] for point in record["curve"]}) == 3


def test_the_numbers_are_no_matter_of_batches(trained):
    one, other = (dropping(trained, 160, size, [2, 1]).record["metrics"] for size in (1, 16))
    assert list(one) == ["ppl_drop_1", "ppl_drop_2"]
    assert one == pytest.approx(other, rel=1e-5)


def test_of_a_token_that_is_limited_to_groups_only_their_experts_are_dropped(tmp_path_factory, cache_dir):
    keys = ("balancing=lf_groups", "model.num_experts=8")
    grouped = trained_run(tmp_path_factory, cache_dir, *keys)
    assert [point["drop"] for point in dropping(grouped, 64, 4, None).record["curve"]] == [0, 1, 2]  # 4 of 8 are open
    with pytest.raises(UserError, match="2 of 4 experts are left"):
        dropping(grouped, 64, 4, [3])

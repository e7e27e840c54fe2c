"""The analysis `coactivation`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.coactivation import closest_pair, coactivation, companion_share, count_together
from simbal.analysis.routing import routing
from simbal.model.router import Routing

LOGITS_NE = torch.tensor([[2, 1, 0, -1], [1.5, -0.5, 0.5, -2], [0.2, 0.8, -1, 0.1], [1, 0.9, -0.4, -0.6]])


def test_counts_of_four_tokens_match_hand_calculation():
    together_EE = count_together(Routing.of_logits(LOGITS_NE, 2, torch.eye(4)))  # {0,1}, {0,2}, {1,0}, {0,1}
    assert together_EE.tolist() == [[4, 3, 1, 0], [3, 3, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert closest_pair(together_EE) == (1.0, 1, 0)
    assert companion_share(together_EE) == (3 + 3 + 1 + 0) / 8


@given(top_k=st.integers(2, 6), seed=st.integers(0, 999))
def test_counts_match_a_loop_over_tokens_and_shares_sum_to_k_minus_1(top_k, seed):
    logits_NE = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed))
    routed = Routing.of_logits(logits_NE, top_k, torch.eye(6))
    together_EE = count_together(routed)
    sets = [set(experts) for experts in routed.topk_experts_NK.tolist()]
    for i in range(6):
        assert together_EE[i].tolist() == [sum({i, j} <= chosen for chosen in sets) for j in range(6)]
        assert together_EE[i].sum() == top_k * together_EE[i, i]  # K - 1 others and itself
    share, i, j = closest_pair(together_EE)
    assert i != j
    assert share == together_EE[i, j] / together_EE[i, i]
    assert (top_k - 1) / 5 - 1e-12 <= share <= 1


def test_a_run_has_the_counts_of_its_routing(trained):
    run = trained("balancing=lf")
    record = coactivation(run, None, 4).record
    expected = routing(run, None, 4, pairs=2, bins=1, seed=0, against=None).record
    assert record["layers"]["tokens_per_expert"] == expected["layers"]["tokens_per_expert"]
    assert record["tokens"] == expected["tokens"]
    assert record["chance"] == pytest.approx(1 / 3)
    for layer, rows in enumerate(record["together"]):
        assert [len(row) for row in rows] == [4, 3, 2, 1]
        assert [row[0] for row in rows] == record["layers"]["tokens_per_expert"][layer]
        assert sum(map(sum, rows)) == record["tokens"] * 3  # two experts and one pair
    assert record["metrics"]["largest"] == max(record["layers"]["largest"]) > 1 / 3
    assert record == coactivation(run, None, 7).record

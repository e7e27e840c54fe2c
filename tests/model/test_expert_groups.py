"""A token's experts lie in its best groups."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.model.router import Groups


def test_groups_leave_open_the_experts_of_the_best():
    scores_NE = torch.tensor([[9.0, 0.0, 5.0, 5.0, 1.0, 1.0, 2.0, 2.0]])
    closed = -torch.inf
    best = Groups(4, 1, "best").limited(scores_NE)
    assert best.tolist() == [[9, 0, closed, closed, closed, closed, closed, closed]]
    together = Groups(4, 1, "best two").limited(scores_NE)
    assert together.tolist() == [[closed, closed, 5, 5, closed, closed, closed, closed]]


def test_the_best_expert_of_all_may_lie_outside_of_the_best_two():
    limited_NE = Groups(2, 1, "best two").limited(torch.tensor([[0.9, 0.1, 0.6, 0.55]]))
    assert limited_NE.topk(2).indices.tolist() == [[2, 3]]


def test_open_experts_may_have_negative_scores():
    limited_NE = Groups(2, 1, "best two").limited(torch.tensor([[-0.9, -0.1, -0.6, -0.55]]))
    assert limited_NE.topk(2).indices.tolist() == [[1, 0]]


def test_a_tie_goes_to_the_lowest_group():
    limited_NE = Groups(3, 2, "best two").limited(torch.tensor([[1.0, 1.0, 2.0, 0.0, 0.0, 2.0]]))
    assert limited_NE.isinf().tolist() == [[False, False, False, False, True, True]]


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_what_is_open_is_what_sorting_the_groups_by_hand_leaves_open(count, size, data):
    chosen = data.draw(st.integers(1, count))
    score, best = data.draw(st.sampled_from([("best", 1), ("best two", 2)]))
    scores_NE = torch.randn(7, count * size, generator=torch.Generator().manual_seed(count * size))
    limited_NE = Groups(count, chosen, score).limited(scores_NE)
    for row, limited in zip(scores_NE.tolist(), limited_NE.tolist(), strict=True):
        groups = [row[first : first + size] for first in range(0, len(row), size)]
        order = sorted(range(count), key=lambda group: -sum(sorted(groups[group])[-best:]))
        by_hand = [x if i // size in order[:chosen] else -torch.inf for i, x in enumerate(row)]
        assert limited == by_hand

"""Pairwise expert similarity (PES) matches its definition, and so do measures of router rows."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from simbal.metrics.similarity import (
    RunningSimilarity,
    max_cosine,
    mean_squared_cosine,
    off_diagonal_cosines,
    row_norms,
)
from tests.metrics.all_experts import pairwise_expert_similarity

WEIGHT_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])


def by_pairs(outputs_END):
    """The mean cosine over all pairs, in fp64."""
    pairs = list(itertools.combinations(outputs_END.double(), 2))
    return sum(F.cosine_similarity(a_ND, b_ND, dim=1, eps=0) for a_ND, b_ND in pairs) / len(pairs)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(
    ("vectors", "similarity"),
    [
        ([[1, 0], [0, 1], [1, 1]], math.sqrt(2) / 3),
        ([[3, 4, 0]] * 5, 1.0),
        ([[2, 0, 0], [0, 1, 0], [0, 0, 5]], 0.0),
        ([[1, 0], [-0.5, math.sqrt(3) / 2], [-0.5, -math.sqrt(3) / 2]], -1 / 2),
        ([[1, 0], [-1, 0]], -1.0),
    ],
)
def test_values_match_hand_calculation_at_every_scale(vectors, similarity, scale):
    outputs_E1D = scale * torch.tensor(vectors, dtype=torch.float32)[:, None]
    assert pairwise_expert_similarity(outputs_E1D).tolist() == pytest.approx([similarity], abs=1e-6)


@given(st.integers(2, 7), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_similarity_equals_the_mean_over_pairs(num_experts, num_tokens, width, seed):
    outputs_END = torch.randn(num_experts, num_tokens, width, generator=torch.Generator().manual_seed(seed))
    similarity_N = pairwise_expert_similarity(outputs_END)
    torch.testing.assert_close(similarity_N.double(), by_pairs(outputs_END), atol=1e-5, rtol=0)
    assert similarity_N.min() >= -1 / (num_experts - 1) - 1e-5
    assert similarity_N.max() <= 1 + 1e-5


def test_outputs_of_length_0_are_counted_and_have_cosine_0():
    running = RunningSimilarity()
    for row in ([1.0, 0.0], [1.0, 0.0], [0.0, 0.0]):
        running.add(torch.tensor([row, [1.0, 1.0]]))
    assert running.similarity_N.tolist() == pytest.approx([1 / 3, 1.0])
    assert running.zero_outputs == 1


def test_bf16_outputs_are_compared_in_fp32():
    outputs_END = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    similarity_N = pairwise_expert_similarity(outputs_END)
    assert similarity_N.dtype == torch.float32
    torch.testing.assert_close(similarity_N, pairwise_expert_similarity(outputs_END.float()))


def test_cosines_ignore_lengths_and_are_0_for_a_row_of_zeros_or_a_single_expert():
    scaled_ED = WEIGHT_ED * torch.tensor([[3.0], [0.1]])
    assert max_cosine(scaled_ED).item() == pytest.approx(0.4)
    assert row_norms(scaled_ED).tolist() == pytest.approx([3 * 1.25**0.5, 0.1 * 1.25**0.5])
    assert off_diagonal_cosines(torch.tensor([[1.0, 0], [0, 0]])).tolist() == [[0, 0], [0, 0]]
    assert (max_cosine(torch.ones(1, 4)).item(), mean_squared_cosine(torch.ones(1, 4)).item()) == (0, 0)


def test_a_batch_of_routers_is_measured_router_by_router():
    both_LED = torch.stack([WEIGHT_ED, torch.eye(2, 3)])
    assert max_cosine(both_LED).tolist() == pytest.approx([0.4, 0])
    assert mean_squared_cosine(both_LED).tolist() == pytest.approx([0.16, 0])

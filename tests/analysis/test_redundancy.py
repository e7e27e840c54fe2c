"""The analysis `redundancy`: pairwise expert similarity (PES)."""

import pytest
import torch
import torch.nn.functional as F

from simbal.analysis.quality import document_sums
from simbal.analysis.redundancy import redundancy, summarize
from simbal.model.expert_similarity import layer_similarity, record_similarity
from tests.metrics.all_experts import pairwise_expert_similarity


@pytest.fixture
def run(trained):
    return trained("balancing=lf_lbl")


def test_the_similarity_of_a_layer_compares_the_outputs_of_all_its_experts(run):
    layer = run.model.feed_forwards[0]
    x_ND = torch.randn(9, run.model.shape.d_model, generator=torch.Generator().manual_seed(0))
    running = layer_similarity(x_ND, layer.w13_E2FD, layer.w2_EFD)
    w13_E2FD, w2_EFD = layer.w13_E2FD.double(), layer.w2_EFD.double()
    gate_ENF, up_ENF = (torch.einsum("nd,efd->enf", x_ND.double(), w13_E2FD[:, part]) for part in (0, 1))
    outputs_END = torch.einsum("enf,efd->end", F.silu(gate_ENF) * up_ENF, w2_EFD)
    expected_N = pairwise_expert_similarity(outputs_END)
    torch.testing.assert_close(running.similarity_N.double(), expected_N, atol=1e-5, rtol=0)


def test_every_token_is_measured_and_the_batch_size_does_not_matter(run):
    one, other = (redundancy(run, 160, batch_size).record for batch_size in (1, 16))
    assert one["tokens"] == other["tokens"] == 160
    assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-4, abs=1e-7)
    assert one["layers"]["zero_outputs"] == [0, 0]
    assert one["cost"]["seconds"] > 0


def test_measuring_does_not_change_the_forward_pass(run):
    plain_G3 = document_sums(run, None, 16)
    with record_similarity(run.model.feed_forwards) as seen:
        assert torch.equal(document_sums(run, None, 16), plain_G3)
    assert seen.similarity_LN.shape == (2, int(plain_G3[:, 1].sum()))
    assert not any(layer._forward_pre_hooks for layer in run.model.feed_forwards)


def test_standard_errors_match_hand_calculation():
    pes_L, se_L, metrics = summarize(torch.tensor([[0.1, 0.3], [0.5, 0.1], [0.4, 0.4]]).double())
    assert pes_L == pytest.approx([0.2, 0.3, 0.4])
    assert se_L == pytest.approx([0.1, 0.2, 0.0])  # |a - b| / 2 for two tokens
    expected = {"min_pes": 0.2, "mean_pes": 0.3, "min_pes_se": 0.1, "mean_pes_se": abs(1.0 - 0.8) / 3 / 2}
    assert metrics == pytest.approx(expected)


def test_the_ratio_of_flops_matches_hand_calculation(run):
    # per token and layer: projections 2048, attention to 8.5 positions 544, router 128, an expert 768; the head 2048
    plain = 2 * (2048 + 544 + 128 + 2 * 768) + 2048
    assert run.every_expert_flops() == pytest.approx((plain + 2 * 4 * 768) / plain)

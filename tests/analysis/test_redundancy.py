"""PES of a run is that of all pairs of its experts, and measuring it touches nothing."""

import pytest
import torch
import torch.nn.functional as F

from simbal.analysis.quality import document_sums
from simbal.analysis.redundancy import redundancy, summary
from simbal.model.expert_similarity import layer_similarity, record_similarity
from simbal.model.moe import MoELayer
from tests.analysis.module_runs import trained_run
from tests.metrics.all_experts import pairwise_expert_similarity


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache_dir):
    return trained_run(tmp_path_factory, cache_dir, "balancing=lf_lbl")


def all_outputs(layer: MoELayer, x_ND):
    w13_E2FD, w2_EFD = layer.w13_E2FD.double(), layer.w2_EFD.double()
    gate_ENF, up_ENF = (torch.einsum("nd,efd->enf", x_ND.double(), w13_E2FD[:, part]) for part in (0, 1))
    return torch.einsum("enf,efd->end", F.silu(gate_ENF) * up_ENF, w2_EFD)


def test_a_layers_similarity_is_that_of_all_its_experts_outputs(trained):
    layer = trained.model.feed_forwards[0]
    x_ND = torch.randn(9, trained.model.shape.d_model, generator=torch.Generator().manual_seed(0))
    running = layer_similarity(x_ND, layer.w13_E2FD, layer.w2_EFD)
    expected_N = pairwise_expert_similarity(all_outputs(layer, x_ND))
    torch.testing.assert_close(running.similarity_N.double(), expected_N, atol=1e-5, rtol=0)


def test_the_numbers_are_those_of_every_token_and_no_matter_of_batches(trained):
    one, other = (redundancy(trained, 160, batch_size).record for batch_size in (1, 16))
    assert one["tokens"] == other["tokens"] == 160
    for numbers in ("min_pes", "mean_pes", "min_pes_se", "mean_pes_se"):
        assert one["metrics"][numbers] == pytest.approx(other["metrics"][numbers], rel=1e-4, abs=1e-7)
    assert one["metrics"]["min_pes"] == min(one["layers"]["pes"])
    assert one["metrics"]["mean_pes"] == pytest.approx(sum(one["layers"]["pes"]) / 2)
    assert one["layers"]["zero_outputs"] == [0, 0]
    assert one["cost"]["seconds"] > 0


def test_the_hidden_stream_is_untouched(trained):
    plain_G3 = document_sums(trained, None, 16)
    with record_similarity(trained.model.feed_forwards) as seen:
        assert torch.equal(document_sums(trained, None, 16), plain_G3)
    assert seen.similarity_LN.shape == (2, int(plain_G3[:, 1].sum()))
    assert not any(layer._forward_pre_hooks for layer in trained.model.feed_forwards)


def test_standard_errors_of_stated_similarities():
    pes_L, se_L, metrics = summary(torch.tensor([[0.1, 0.3], [0.5, 0.1], [0.4, 0.4]]).double())
    assert pes_L == pytest.approx([0.2, 0.3, 0.4])
    assert se_L == pytest.approx([0.1, 0.2, 0.0])  # |a - b| / 2 of two tokens
    assert metrics["min_pes"] == pytest.approx(0.2)
    assert metrics["min_pes_se"] == pytest.approx(0.1)
    assert metrics["mean_pes_se"] == pytest.approx(abs(1.0 - 0.8) / 3 / 2)


def test_the_multiple_of_flops_by_hand(trained):
    # of one token in a layer: projections 2048, scores and values of 8.5 positions 544, router 128, an expert 768;
    # the head once 2048
    plain = 2 * (2048 + 544 + 128 + 2 * 768) + 2048
    assert trained.every_expert_flops() == pytest.approx((plain + 2 * 4 * 768) / plain)

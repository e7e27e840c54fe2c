"""Routers whose deviation is known, and those of a run."""

import pytest
import torch

from simbal.analysis.orthogonality import FORMATS, measured, orthogonality
from simbal.analysis.trained import load
from simbal.metrics.similarity import max_cosine, mean_squared_cosine, off_diagonal_cosines, row_norms
from simbal.training.run import train

WEIGHT_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])


@pytest.fixture
def trained(small_spec):
    spec = small_spec("balancing=simbal", "trainer.max_steps=2")
    train(spec)
    return load(spec.path, "cpu")


def test_a_small_routers_numbers_are_those_worked_out_by_hand():
    assert measured(WEIGHT_ED) == pytest.approx(
        {
            "gram_deviation": 0.15625, "gram_deviation_fp32": 0.15625, "max_deviation_bf16": 0.5,
            "max_deviation_fp32": 0.5, "norm_min": 1.25**0.5, "norm_mean": 1.25**0.5, "norm_max": 1.25**0.5,
            "max_cosine": 0.4, "mean_squared_cosine": 0.16,
        }
    )  # fmt: skip


def test_cosines_do_not_see_lengths_and_a_row_of_zeros_has_none():
    scaled_ED = WEIGHT_ED * torch.tensor([[3.0], [0.1]])
    assert max_cosine(scaled_ED).item() == pytest.approx(0.4)
    assert row_norms(scaled_ED).tolist() == pytest.approx([3 * 1.25**0.5, 0.1 * 1.25**0.5])
    assert off_diagonal_cosines(torch.tensor([[1.0, 0], [0, 0]])).tolist() == [[0, 0], [0, 0]]


def test_the_numbers_of_a_batch_of_routers_are_those_of_each():
    both_LED = torch.stack([WEIGHT_ED, torch.eye(2, 3)])
    assert max_cosine(both_LED).tolist() == pytest.approx([0.4, 0])
    assert mean_squared_cosine(both_LED).tolist() == pytest.approx([0.16, 0])


def test_one_expert_has_no_angle_to_another():
    assert (max_cosine(torch.ones(1, 4)).item(), mean_squared_cosine(torch.ones(1, 4)).item()) == (0, 0)


def test_a_runs_metrics_are_the_means_of_its_layers(trained):
    record = orthogonality(trained).record
    assert record["metrics"].keys() == record["layers"].keys() == FORMATS.keys()
    for name, values in record["layers"].items():
        assert len(values) == record["num_layers"] == 2
        assert record["metrics"][name] == pytest.approx(sum(values) / 2)
    assert record["layers"]["norm_min"] == [row_norms(w.weight_ED.detach()).min().item() for w in trained.model.routers]
    recorded = trained.record["metrics"]["val/gram_deviation"]
    assert record["metrics"]["gram_deviation"] == pytest.approx(recorded)

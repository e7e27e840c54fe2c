"""The analysis `orthogonality`."""

import pytest
import torch

from simbal.analysis.orthogonality import COLUMNS, measure_router, orthogonality
from simbal.metrics.similarity import row_norms

WEIGHT_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])


def test_numbers_of_a_small_router_match_hand_calculation():
    assert measure_router(WEIGHT_ED) == pytest.approx(
        {
            "gram_deviation": 0.15625, "gram_deviation_fp32": 0.15625, "max_deviation_bf16": 0.5,
            "max_deviation_fp32": 0.5, "norm_min": 1.25**0.5, "norm_mean": 1.25**0.5, "norm_max": 1.25**0.5,
            "max_cosine": 0.4, "mean_squared_cosine": 0.16,
        }
    )  # fmt: skip


def test_metrics_of_a_run_are_means_over_layers(trained):
    run = trained("balancing=simbal")
    record = orthogonality(run).record
    assert record["metrics"].keys() == record["layers"].keys() == COLUMNS.keys()
    for name, values in record["layers"].items():
        assert len(values) == record["num_layers"] == 2
        assert record["metrics"][name] == pytest.approx(sum(values) / 2)
    assert record["layers"]["norm_min"] == [row_norms(w.weight_ED.detach()).min().item() for w in run.model.routers]
    assert record["metrics"]["gram_deviation"] == pytest.approx(run.record["metrics"]["val/gram_deviation"])

"""The analysis `ep_load`."""

import pytest
import torch

from simbal.analysis.ep_load import ep_load, sequence_counts, step_counts
from simbal.errors import UserError
from simbal.metrics.routing import max_vio
from simbal.model.router import Routing

KEYS = {"tokens": None, "batch_size": 4, "step": 2, "devices": None, "seed": 0}
LOGITS_NE = torch.tensor([[2, 1, 0, -1], [1.5, -0.5, 0.5, -2], [0.2, 0.8, -1, 0.1], [1, 0.9, -0.4, -0.6]])


@pytest.fixture
def run(trained):
    return trained("balancing=simbal")


def test_each_sequence_is_counted_separately():
    routed = Routing.of_logits(LOGITS_NE, 2, torch.eye(4), num_sequences=2)  # {0,1}, {0,2}; {1,0}, {0,1}
    counts_BLE = sequence_counts([routed, routed])
    assert counts_BLE[:, 0].tolist() == counts_BLE[:, 1].tolist() == [[2, 1, 1, 0], [2, 2, 0, 0]]
    assert torch.equal(counts_BLE.sum(0)[0], routed.tokens_per_expert_E)


def test_a_step_has_different_sequences_in_an_order_that_depends_only_on_the_seed():
    counts_BLE = 2 ** torch.arange(7)[:, None, None]  # the bits of a sum are its sequences
    counts_TLE = step_counts(counts_BLE, 3, seed=0)
    assert counts_TLE.shape == (2, 1, 1)
    assert [f"{count:b}".count("1") for count in counts_TLE.flatten().tolist()] == [3, 3]
    assert counts_TLE[0] & counts_TLE[1] == 0
    assert torch.equal(counts_TLE, step_counts(counts_BLE, 3, seed=0))
    assert not torch.equal(counts_TLE, step_counts(counts_BLE, 3, seed=1))


def test_the_load_of_all_steps_equals_the_load_in_the_runs_validation(run):
    record = ep_load(run, **KEYS | {"step": 1}).record
    assert record["devices"] == [2, 4]
    counts_LE = torch.tensor(run.record["layers"]["val/tokens_per_expert"])
    pairs_L2 = counts_LE.double().view(2, 2, 2).sum(2)
    assert record["layers"]["overload_total_2"] == pytest.approx((pairs_L2.amax(1) / pairs_L2.mean(1)).tolist())
    assert record["layers"]["overload_total_4"] == pytest.approx((max_vio(counts_LE) + 1).tolist())


def test_numbers_over_steps_match_separate_counts_of_each_step(run):
    record = ep_load(run, **KEYS | {"step": 3, "batch_size": 1}).record
    counts_BLE = torch.cat([sequence_counts(batch.routings) for batch in run.predict(16)])
    counts_TLE = step_counts(counts_BLE, 3, seed=0)
    overload_TL = counts_TLE.amax(2) / counts_TLE.double().mean(2)
    assert record["metrics"]["overload_4"] == pytest.approx(overload_TL.mean().item())
    assert record["metrics"]["overload_max_4"] == pytest.approx(overload_TL.max().item())
    assert record["layers"]["overload_max_4"] == pytest.approx(overload_TL.amax(0).tolist())
    assert record["metrics"] == ep_load(run, **KEYS | {"step": 3, "batch_size": 5}).record["metrics"]
    assert record["metrics"]["overload_total_4"] < record["metrics"]["overload_4"]  # small steps are less balanced


def test_an_incomplete_step_is_ignored_and_noted(run):
    sequences = run.num_sequences()
    result = ep_load(run, **KEYS | {"step": sequences - 1})
    assert result.record["steps"] == 1
    assert result.record["tokens"] == (sequences - 1) * 16
    assert result.notes[-1].startswith("1 sequences")
    assert len(ep_load(run, **KEYS | {"step": sequences}).notes) == 1
    with pytest.raises(UserError, match=f"step={sequences + 1} must be at most {sequences}"):
        ep_load(run, **KEYS | {"step": sequences + 1})
    with pytest.raises(UserError, match=r"devices=\[3\] must be .* divisors of num_experts=4: 1, 2, 4"):
        ep_load(run, **KEYS | {"devices": [3]})

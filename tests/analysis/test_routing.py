"""The analysis `routing`."""

import json

import pytest
import torch

from simbal.analysis.routing import RoutingTotals, TokenPairs, correlation, mean_in_bins, over_layers, routing
from simbal.errors import UserError
from simbal.model.router import Routing, count_tokens

KEYS = {"tokens": None, "batch_size": 4, "pairs": 64, "bins": 4, "seed": 0, "against": None}
PROBS_NE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]])


def routed(probs_NE, num_sequences, top_k=2):
    """A routing with these probabilities by a router that renormalizes."""
    weights_NK, experts_NK = probs_NE.topk(top_k)
    counts_E = count_tokens(experts_NK, probs_NE.shape[1])
    weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return Routing(
        probs_NE.log(), probs_NE, experts_NK, weights_NK, counts_E, torch.eye(4), num_sequences, "softmax",
        False, top_k,
    )  # fmt: skip


def totals_of(*routings, seq_len, others=None):
    totals = RoutingTotals(seq_len)
    totals.add(routings, others)
    return totals


def test_numbers_of_four_tokens_match_hand_calculation():
    layers = totals_of(routed(PROBS_NE, num_sequences=2), seq_len=2).layers()
    assert {name: values[0] for name, values in layers.items()} == pytest.approx(
        {
            "seu": 0.875, "unique_experts": 4, "dead_experts": 0, "near_dead_experts": 0, "max_vio": 0.5,
            "gini": 0.1875, "squared_variation": 0.125, "entropy": 0.677572, "entropy_full": 1.245421,
            "entropy_load": 1.320888, "effective_share": 3.746748 / 4, "mutual_information": 0.120444,
        },
        abs=1e-6,
    )  # fmt: skip


def test_a_collapsed_layer_uses_k_experts_and_counts_are_summed_over_layers():
    collapsed = routed(PROBS_NE[:1].repeat(4, 1), num_sequences=2)
    layers = totals_of(routed(PROBS_NE, 2), collapsed, seq_len=2).layers()
    assert layers["unique_experts"] == [4, 2]
    assert layers["seu"] == [0.875, 0.5]
    assert layers["mutual_information"][1] == pytest.approx(0, abs=1e-7)
    over = over_layers(layers)
    assert (over["unique_experts"], over["dead_experts"], over["near_dead_experts"]) == (6, 2, 2)
    assert over["unique_experts_min"] == 2
    assert over["max_vio"] == pytest.approx((0.5 + 1) / 2)


def test_seu_at_a_length_uses_whole_pieces_of_a_sequence():
    # expert 0 for 128 tokens, 1 for 128, then 2 and 3 alternate
    choice_N = torch.tensor([0] * 128 + [1] * 128 + [2, 3] * 22)
    probs_NE = torch.full((300, 4), 0.1)
    probs_NE[torch.arange(300), choice_N] = 0.7
    layers = totals_of(routed(probs_NE, num_sequences=1, top_k=1), seq_len=300).layers()
    assert layers["seu_128"] == [0.25]
    assert layers["seu"] == [1.0]
    assert "seu_512" not in layers


def test_saturation_is_the_fraction_of_common_experts():
    ours = routed(PROBS_NE, num_sequences=2)
    # {0,1}, {0,2}, {3,2}, {1,0} against {1,0}, {0,1}, {0,2}, {3,2}
    theirs = routed(PROBS_NE.roll(1, 0), num_sequences=2)
    for others, expected in (([ours], 1.0), ([theirs], (2 + 1 + 1 + 0) / 8)):
        assert totals_of(ours, seq_len=2, others=others).layers()["saturation"] == [expected]


def test_sums_do_not_depend_on_batches():
    whole, parts = totals_of(routed(PROBS_NE, 2), seq_len=2), RoutingTotals(2)
    for rows_NE in PROBS_NE.split(2):
        parts.add([routed(rows_NE, 1)])
    assert parts.layers() == {name: pytest.approx(values) for name, values in whole.layers().items()}
    assert parts.tokens_per_expert() == whole.tokens_per_expert() == [[3, 2, 2, 1]]


def test_pairs_have_different_tokens_and_depend_only_on_the_seed():
    x_ND = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    whole, parts, other = (TokenPairs(12, 50, seed) for seed in (0, 0, 1))
    for pairs in (whole, other):
        pairs.add([x_ND], [routed(PROBS_NE.repeat(3, 1), 3)])
    for start in (0, 4, 8):
        parts.add([x_ND[start : start + 4]], [routed(PROBS_NE, 1)])
    compared = whole.compare([torch.eye(4)])
    for values_LC, again_LC in zip(compared, parts.compare([torch.eye(4)]), strict=True):
        assert torch.equal(values_LC, again_LC)
    assert compared[0].max() < 1 - 1e-6
    assert not torch.equal(compared[0], other.compare([torch.eye(4)])[0])
    assert torch.equal(compared[0], compared[1])  # an identity as a router keeps every cosine


def test_correlation_is_pearsons_and_undefined_for_a_constant():
    x_C, y_C = torch.tensor([[0.1, 0.4, -0.3, 0.9], [0.3, 0.2, -0.1, 0.5]]).double()
    assert correlation(x_C, y_C) == pytest.approx(torch.corrcoef(torch.stack([x_C, y_C]))[0, 1].item())
    assert correlation(x_C, torch.full((4,), 0.1).double()) is None


def test_bins_cover_cosines_from_minus_1_to_1_inclusive():
    cosines_C = torch.tensor([-1, -0.6, 0.0, 0.4, 1.0, 1.0 + 1e-12]).double()
    counts, means = mean_in_bins(cosines_C, torch.tensor([1, 0, 0.5, 0, 1, 1]), bins=4)
    assert counts == [2, 0, 2, 2]
    assert means == [0.5, None, 0.25, 1.0]


def test_inputs_are_the_inputs_of_the_routers_and_no_hook_remains(trained):
    run = trained("balancing=lbl")
    with run.inputs() as inputs:
        batch = next(run.predict(2))
        for x_ND, router, routed_N in zip(inputs, run.routers, batch.routings, strict=True):
            torch.testing.assert_close(x_ND @ router.weight_ED.detach().T, routed_N.logits_NE)
    assert not any(router._forward_pre_hooks for router in run.routers)


@pytest.mark.parametrize("overrides", [("balancing=simbal",), ("balancing=lf", "router=sigmoid")])
def test_numbers_equal_the_runs_validation_at_any_batch_size(trained, overrides):
    run = trained(*overrides)
    record = routing(run, **KEYS).record
    for name in ("seu", "entropy", "max_vio", "unique_experts"):
        assert record["metrics"][name] == pytest.approx(run.record["metrics"][f"val/{name}"], rel=1e-5)
        assert record["layers"][name] == pytest.approx(run.record["layers"][f"val/{name}"], rel=1e-5)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["tokens"] == 16 * record["sequences"] == 16 * run.num_sequences()
    assert sum(record["choice_overlap"]["pairs"]) == 64 * 2
    other = routing(run, **KEYS | {"batch_size": 32}).record
    assert other["metrics"] == pytest.approx(record["metrics"], rel=1e-6, abs=1e-6)
    assert other["layers"]["tokens_per_expert"] == record["layers"]["tokens_per_expert"]
    assert other["choice_overlap"] == record["choice_overlap"]


def saturation_of(run, against, tokens=None):
    return routing(run, **KEYS | {"tokens": tokens, "against": str(against)}).record["metrics"]["saturation"]


def test_saturation_is_1_against_the_same_weights_and_lower_against_earlier_ones(trained):
    run = trained("balancing=simbal", "trainer.keep_every=2", "optim.lr=0.05")
    kept = ("final.ckpt", "weights-00000002.ckpt", "weights-00000004.ckpt")
    final, second, fourth = (saturation_of(run, run.path / "checkpoints" / name) for name in kept)
    assert final == fourth == 1.0
    assert 0 < second < 1
    plain = trained("balancing=simbal", "optim.lr=0.05").module.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in run.module.state_dict().items())


def test_saturation_compares_the_same_windows_even_if_data_seeds_differ(trained):
    one, other = (trained("balancing=simbal", "optim.lr=1e-12", f"data.seed={seed}") for seed in (0, 1))
    assert one.validation.sample(64).tolist() != other.validation.sample(64).tolist()
    assert saturation_of(one, other.path, tokens=64) == 1.0


@pytest.mark.parametrize(
    ("change", "difference"), [("model.num_experts=8", "model.num_experts=8"), ("data.documents=65", "tokens=")]
)
def test_a_run_of_another_shape_or_on_other_data_is_rejected(trained, change, difference):
    run, other = trained("balancing=simbal"), trained("balancing=simbal", change)
    with pytest.raises(UserError, match=f"^against={other.path} has {difference}.*{run.path} has"):
        saturation_of(run, other.path)

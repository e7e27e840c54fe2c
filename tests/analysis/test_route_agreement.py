"""The analysis `route_agreement`."""

from statistics import median_low

import pytest

from simbal.analysis.route_agreement import route_agreement
from simbal.errors import UserError

KEYS = {
    "tokens": 160, "batch_size": 3, "against": None, "dtype": None, "backend": None, "other_batch_size": None,
}  # fmt: skip
RUN = ("balancing=simbal", "trainer.keep_every=2", "optim.lr=0.05")


def agreement(run, **changes):
    return route_agreement(run, **KEYS | changes).record


def test_other_weights_agree_as_counted_by_hand(trained):
    run = trained(*RUN)
    path = run.path / "checkpoints" / "weights-00000002.ckpt"
    record = agreement(run, against=str(path))
    earlier = run.variant(str(path))
    tokens = []  # by layer and token: whether the experts are the same, and the margin
    for ours, theirs in zip(run.predict(3, 160), earlier.predict(3, 160), strict=True):
        for layer, (own, other) in enumerate(zip(ours.routings, theirs.routings, strict=True)):
            for token, logits in enumerate(own.logits_NE.tolist()):
                same = {*own.topk_experts_NK[token].tolist()} == {*other.topk_experts_NK[token].tolist()}
                tokens.append((layer, same, second_minus_third(logits)))
    for layer in (0, 1):
        own = [(same, margin) for its_layer, same, margin in tokens if its_layer == layer]
        assert record["layers"]["agreement"][layer] == pytest.approx(sum(same for same, _ in own) / len(own))
        assert record["layers"]["margin"][layer] == pytest.approx(median_low([margin for _, margin in own]))
        differing = [margin for same, margin in own if not same]
        assert record["layers"]["margin_differing"][layer] == pytest.approx(median_low(differing))
        assert record["layers"]["margin_differing_max"][layer] == pytest.approx(max(differing))
    metrics = record["metrics"]
    assert metrics["agreement"] == pytest.approx(sum(record["layers"]["agreement"]) / 2)
    assert 0 < metrics["agreement_every_layer"] <= metrics["agreement"] < 1
    assert record["tokens"] == len(tokens) / 2


def second_minus_third(logits):
    third, second = sorted(logits)[1:3]
    return second - third


def test_batch_sizes_and_backends_agree_up_to_rounding(trained):
    for changes, named in (
        ({"other_batch_size": 1}, "1 sequences per batch"), ({"backend": "reference"}, "experts: reference"),
        ({"dtype": "bfloat16"}, "bf16-mixed"),
    ):  # fmt: skip
        record = agreement(trained(*RUN), **changes)
        assert named in record["compared"]["second"]
        assert named not in record["compared"]["first"]
        assert record["metrics"]["agreement"] > (0.9 if "dtype" in changes else 0.99)
    record = agreement(trained(*RUN))
    assert (record["metrics"]["agreement"], record["metrics"]["margin_differing"]) == (1, None)


def test_a_computation_that_cannot_be_compared_is_refused(trained):
    run = trained(*RUN)
    wider = trained("balancing=simbal", "model.num_experts=8")
    for changes, part in (
        ({"dtype": "float16"}, "dtype=float16 is not one of float32, bfloat16"),
        ({"backend": "fast"}, "backend=fast is not one of"),
        ({"against": str(wider.path)}, "has model.num_experts=8"),
    ):
        with pytest.raises(UserError, match=part):
            agreement(run, **changes)

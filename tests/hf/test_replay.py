"""Routing replay gives tokens their recorded experts, with weights from the live logits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from simbal.analysis.route_agreement import route_agreement
from simbal.balancing import HashRouting, LossFree, SimBal
from simbal.errors import UserError
from simbal.hf import Routes, attach, record, replay
from tests.hf.architectures import NAMES, B, E, K, S, V, architecture, batch, host, padded, record_experts
from tests.hf.measured import IDS, host_of, save

REPLAYED = [name for name in NAMES if name != "phimoe"]
WEIGHTS = {  # of the chosen experts, from all logits
    "mixtral": lambda z_NE, e_NK: z_NE.gather(1, e_NK).softmax(1),
    "gpt_oss": lambda z_NE, e_NK: z_NE.gather(1, e_NK).softmax(1),
    "olmoe": lambda z_NE, e_NK: z_NE.softmax(1).gather(1, e_NK),
    "deepseek_v3": lambda z_NE, e_NK: 2.5 * F.normalize(z_NE.sigmoid().gather(1, e_NK), p=1, dim=1),
}


def perturbed(model):
    """Return a copy whose routers choose other experts."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight", ".router.gate.weight")):
                weight.add_(torch.randn_like(weight))
    return model


def chosen(model) -> list[torch.Tensor]:
    with record(model) as routes:
        model(**batch())
    return routes.experts


@pytest.mark.parametrize("name", REPLAYED)
def test_replaying_a_pass_changes_no_bit_of_outputs_and_gradients(name):
    model, found, routes = architecture(name), [], None
    for _ in range(2):
        model.zero_grad()
        with record(model) if routes is None else replay(model, routes) as recorded:
            output = model(**batch())
        output.loss.backward()
        routes = routes or recorded
        found.append([output.logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert {(table.shape, table.dtype) for table in routes.experts} == {((B * S, K), torch.int16)}


@pytest.mark.parametrize("name", WEIGHTS)
def test_other_weights_get_the_recorded_experts_weighted_by_their_own_logits(name):
    model = architecture(name)
    other, logits = perturbed(model), []
    with record(model) as routes:
        model(**batch())
    assert not all(map(torch.equal, chosen(other), routes.experts))
    calls = record_experts(other)
    for module in other.modules():
        if type(module).__name__.endswith("Router") or type(module).__name__ == "DeepseekV3TopkRouter":
            module.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    with replay(other, routes):
        assert all(map(torch.equal, chosen(other), routes.experts))
    for (_, experts_NK, weights_NK), logits_NE, table_NK in zip(calls, logits, routes.experts, strict=True):
        assert torch.equal(experts_NK, table_NK.long())
        torch.testing.assert_close(weights_NK, WEIGHTS[name](logits_NE.float(), experts_NK))


def test_half_precision_follows_the_choice_of_full_precision():
    model = architecture("qwen3_moe")
    half = copy.deepcopy(model).bfloat16()
    with record(model) as routes:
        model(**batch())
    assert not all(map(torch.equal, chosen(half), routes.experts))
    with replay(half, routes):
        assert all(map(torch.equal, chosen(half), routes.experts))


@torch.no_grad()
def test_generated_tokens_are_replayed_in_one_pass_with_other_padding_and_batches():
    model = architecture("mixtral")
    prompts_BS, lengths = batch()["input_ids"], (8, 5, 3)
    rows = zip(prompts_BS, lengths, strict=True)
    left_BS = torch.stack([torch.cat([prompts_BS.new_zeros(S - n), row[:n]]) for row, n in rows])
    mask_BS = torch.stack([torch.arange(S) >= S - n for n in lengths]).long()
    with record(model) as routes:
        new_BS = model.generate(
            left_BS, attention_mask=mask_BS, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )[:, S:]
    assert len(routes.positions_R2) == sum(n + 3 for n in lengths)  # the last token is never an input
    other = perturbed(model)
    for sequences in ([0, 1, 2], [0, 1], [0]):  # the others are replayed in a second pass
        rest = [sequence for sequence in range(B) if sequence not in sequences]
        with replay(other, routes), record(other) as replayed:
            for group in filter(None, (sequences, rest)):
                texts = [torch.cat([prompts_BS[row, : lengths[row]], new_BS[row]]) for row in group]
                ids_BS = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
                other(ids_BS, attention_mask=torch.nn.utils.rnn.pad_sequence([*map(torch.ones_like, texts)], True))
        rows_N = replayed.rows(routes.positions_R2)
        assert rows_N.min() >= 0
        assert all(
            torch.equal(theirs[rows_N], own) for theirs, own in zip(replayed.experts, routes.experts, strict=True)
        )
        assert len(replayed.positions_R2) == len(routes.positions_R2) + B


@torch.no_grad()
def test_padded_and_packed_passes_have_the_same_routes():
    model = architecture("olmoe")
    inputs = padded()
    kept_BS = inputs["attention_mask"].bool()
    packed = {
        "input_ids": inputs["input_ids"][kept_BS][None],
        "position_ids": torch.arange(S).expand(B, S)[kept_BS][None],
    }
    with record(model) as routes:
        model(**inputs)
    other = perturbed(model)
    with replay(other, routes), record(other) as replayed:
        other(**packed)
    assert torch.equal(replayed.positions_R2, routes.positions_R2)
    assert all(map(torch.equal, replayed.experts, routes.experts))


def test_gradient_checkpointing_recomputes_with_the_recorded_experts():
    model = host()
    with record(model) as routes:
        model(**batch())
    found = []
    for checkpointing in (False, True):
        other = perturbed(model)
        if checkpointing:
            other.activation_checkpointing_enable()
        with replay(other, routes):
            other(**batch()).loss.backward()
        found.append([weight.grad for weight in other.parameters()])
    assert all(map(torch.equal, *found))


def test_attached_strategies_are_recorded_and_losses_see_the_replayed_choice():
    model = host()
    plain = chosen(model)
    with attach(model, HashRouting()), record(model) as routes:
        model(**batch())
    assert not all(map(torch.equal, plain, routes.experts))
    with attach(model, SimBal()) as balancing, replay(model, routes):
        model(**batch())
        for routing, table_NK in zip(balancing.routings, routes.experts, strict=True):
            assert torch.equal(routing.topk_experts_NK, table_NK.long())


def test_a_router_that_does_not_follow_the_routes_is_an_error():
    model = host()
    with attach(model, HashRouting()), record(model) as routes:
        model(**batch())
    with attach(model, LossFree()), replay(model, routes), pytest.raises(UserError, match="gate did not choose"):
        model(**batch())
    sampled = architecture("phimoe")
    with replay(sampled, routes), pytest.raises(UserError, match="did not choose the recorded experts"):
        sampled(**batch())
    with replay(model, routes):  # nothing is left behind
        model(**batch())


def test_routes_that_do_not_fit_are_refused():
    model = architecture("mixtral")
    tables = [torch.randint(E, (S, K), dtype=torch.int16) for _ in range(3)]
    first = Routes(tables, torch.stack([torch.zeros(S, dtype=torch.int64), torch.arange(S)], 1))
    for wrong in (tables[1:], [table[:, :1] for table in tables]):
        with (
            pytest.raises(UserError, match=r"do not fit MixtralForCausalLM: it has 3 MoE layers with K = 2"),
            replay(model, Routes(wrong, first.positions_R2)),
        ):
            pass
    with replay(model, first):
        model(torch.randint(V, (1, S)))
        with pytest.raises(UserError, match="no token of this forward pass was recorded"):
            model(torch.randint(V, (1, S)))


def test_the_analysis_counts_the_choices_that_change_in_half_precision(tmp_path):
    host = host_of(tmp_path, "qwen3_moe")
    other = save(architecture("qwen3_moe", vocab_size=IDS, num_hidden_layers=2), tmp_path / "shallow")
    keys = {"tokens": 512, "batch_size": 4, "against": None, "other_batch_size": 2}
    record_of = route_agreement(host, **keys, dtype="bfloat16", backend="grouped_mm").record
    tables, ids_BS = [], torch.cat([batch.windows_BT[:, :-1] for batch in host.predict(4, 512)])
    for model in (host.model, AutoModelForCausalLM.from_pretrained(host.path, dtype=torch.bfloat16)):
        with record(model) as routes, torch.no_grad():
            model(ids_BS)
        tables.append(torch.stack([table.sort(1).values for table in routes.experts]))
    same_LN = (tables[0] == tables[1]).all(2).double()
    assert record_of["layers"]["agreement"] == pytest.approx(same_LN.mean(1).tolist(), abs=0.02)
    assert record_of["metrics"]["margin_differing"] < record_of["metrics"]["margin"]
    assert "bfloat16, experts: transformers, grouped_mm, 2 sequences" in record_of["compared"]["second"]
    exact = route_agreement(host, **keys, dtype=None, backend="batched_mm").record
    assert exact["metrics"]["agreement"] > 0.99
    with pytest.raises(UserError, match=r"against=.*shallow has \(layers, experts, K\) = \(2, 8, 2\)"):
        route_agreement(host, **keys | {"against": str(other)}, dtype=None, backend=None)

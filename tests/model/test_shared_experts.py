"""Shared experts: computed for every token beside the chosen ones, and left out of all that is said of routing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from simbal.analysis.pruning import pruned
from simbal.conformance import batch_of, tiny_model
from simbal.cost.parameters import count_parameters, parameters
from simbal.errors import UserError
from simbal.hf.export import read_run
from simbal.model.expert_similarity import record_similarity
from simbal.model.init import initialise
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.router import Router
from simbal.model.transformer import Transformer
from simbal.training.failures import layer_statistics
from simbal.training.run import train
from tests.cost.test_memory import shape_of
from tests.training.run_files import weights

N, D, E, WIDTH, K, Z = 10, 6, 4, 5, 2, 3
IDS_BS = torch.zeros(1, N, dtype=torch.int64)
X_BSD = torch.randn(1, N, D, generator=torch.Generator().manual_seed(1)).double()


def mixture(num_shared: int, bias: bool = False) -> MoELayer:
    router = Router(D, E, K, "softmax", True, layer=0)
    layer = MoELayer(router, D, WIDTH, "reference", bias, num_shared).double()
    generator = torch.Generator().manual_seed(0)  # what is shared comes last
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return layer


def tiny(num_shared: int) -> Transformer:
    model = Transformer(replace(tiny_model().shape, num_shared_experts=num_shared), "torch")
    initialise(model, seed=0, std=0.3, router_init="normal")
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_their_output_is_added_whatever_the_router_says(bias):
    with_them, without = mixture(Z, bias), mixture(0, bias)
    without.load_state_dict({k: v for k, v in with_them.state_dict().items() if not k.startswith("shared")})
    (y_BSD, routing), (plain_BSD, plain) = (layer(X_BSD, IDS_BS) for layer in (with_them, without))
    w13_2FD, w2_FD = with_them.shared.w13_2FD, with_them.shared.w2_FD
    assert w13_2FD.shape == (2, Z * WIDTH, D)
    for token, x_D in enumerate(X_BSD[0]):
        expected_D = torch.zeros(D).double()
        b13_2F, b2_D = (with_them.shared.b13_2F, with_them.shared.b2_D) if bias else (torch.zeros(2, 1), 0)
        gate_F, up_F = (matrix @ x_D + b_F for matrix, b_F in zip(w13_2FD, b13_2F, strict=True))
        for hidden, w2_D in zip(F.silu(gate_F) * up_F, w2_FD, strict=True):
            expected_D += hidden * w2_D
        torch.testing.assert_close(y_BSD[0, token] - plain_BSD[0, token], expected_D + b2_D)
    assert torch.equal(routing.topk_experts_NK, plain.topk_experts_NK)
    assert routing.tokens_per_expert_E.tolist() == plain.tokens_per_expert_E.tolist()
    assert routing.tokens_per_expert_E.sum() == N * K


def test_three_of_them_are_the_sum_of_three_experts():
    shared = mixture(Z).shared
    parts = zip(shared.w13_2FD.split(WIDTH, 1), shared.w2_FD.split(WIDTH), strict=True)
    y_BSD = torch.zeros_like(X_BSD)
    for w13_2FD, w2_FD in parts:
        one = FeedForward(D, WIDTH).double()
        one.load_state_dict({"w13_2FD": w13_2FD, "w2_FD": w2_FD})
        y_BSD += one(X_BSD)
    torch.testing.assert_close(shared(X_BSD), y_BSD)


def test_without_them_there_is_no_weight_of_theirs_and_with_them_all_others_start_as_they_were():
    none, three = (dict(tiny(number).named_parameters()) for number in (0, 3))
    assert none.keys() == dict(tiny_model().named_parameters()).keys()
    added = three.keys() - none.keys()
    assert {name.split(".")[-2] for name in added} == {"shared"}
    assert len(added) == 4
    assert all(torch.equal(three[name], parameter) for name, parameter in none.items())
    assert all(0.2 < three[name].std() < 0.35 for name in added)


def test_all_of_them_are_active_parameters():
    shape = shape_of("tiny", num_shared_experts=3)
    with torch.device("meta"):
        model = Transformer(shape, "reference")
    plain, counted = parameters(replace(shape, num_shared_experts=0)), parameters(shape)
    shared = sum(layer.shared.w13_2FD.numel() + layer.shared.w2_FD.numel() for layer in model.feed_forwards)
    assert counted.total - plain.total == counted.active - plain.active == shared
    assert counted.forward_flops(8) - plain.forward_flops(8) == 2 * shared
    assert count_parameters(model)["experts"] == counted.ffn == plain.ffn + shared
    # the active size of a model with so many more chosen
    assert counted.ffn_active == parameters(replace(shape, num_shared_experts=0, top_k=shape.top_k + 3)).ffn_active


def test_the_similarity_of_experts_is_of_the_others_alone():
    seen = []
    for number in (0, 3):
        model = tiny(number)
        with torch.no_grad(), record_similarity(model.feed_forwards[:1]) as similarity:
            model(batch_of(0)[:, :-1])
        seen.append(similarity.similarity_LN)
    assert torch.equal(*seen)


def test_pruned_experts_leave_the_shared_ones():
    layer = mixture(Z)
    everything, nothing = (
        SimpleNamespace(kept=lambda w_NK, above=above: w_NK > above, weights=lambda w_NK, kept_NK: w_NK * kept_NK)
        for above in (0, 2)
    )
    with torch.no_grad():
        y_BSD, _ = layer(X_BSD, IDS_BS)
        with pruned([layer], everything):
            torch.testing.assert_close(layer(X_BSD, IDS_BS)[0], y_BSD)
        with pruned([layer], nothing):
            assert torch.equal(layer(X_BSD, IDS_BS)[0], layer.shared(X_BSD))


def test_what_is_said_of_a_run_that_diverges_has_their_norms():
    model = tiny(3)
    model(batch_of(0)[:, :-1])[0].sum().backward()
    statistics = layer_statistics(model, None)
    assert all(layer["shared/weight_norm"] > 0 and layer["shared/gradient_norm"] > 0 for layer in statistics)
    assert "shared/weight_norm" not in layer_statistics(tiny(0), None)[0]


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_a_run_trains_them_and_cannot_be_exported(small_spec, gating):
    spec = small_spec("balancing=lbl", f"router={gating}", "model.num_shared_experts=2", "trainer.pes_every=6")
    train(spec)
    shared = {name: tensor for name, tensor in weights(spec).items() if ".shared." in name}
    assert len(shared) == 2 * spec.config.model.num_layers
    start = Transformer(shape_of("tiny", **SMALL_SHAPE), "torch")
    initialise(start, spec.config.seed, spec.config.model.init_std, "normal")
    before = {f"model.{name}": parameter for name, parameter in start.named_parameters()}
    assert not any(torch.equal(before[name], tensor) for name, tensor in shared.items())
    if gating == "softmax":
        with pytest.raises(UserError, match="cannot be exported, for its model.num_shared_experts=2: every expert of"):
            read_run(spec.path)


SMALL_SHAPE = {
    "vocab_size": 64, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_expert": 8, "num_experts": 4, "top_k": 2,
    "num_shared_experts": 2,
}  # fmt: skip


def test_blocks_that_are_computed_again_train_to_the_same_bits(small_spec, tmp_path):
    keys = ("balancing=lbl", "model.num_shared_experts=1")
    specs = [
        small_spec(*keys, f"trainer.activation_checkpointing={again}", output_dir=tmp_path / again)
        for again in ("true", "false")
    ]
    for spec in specs:
        train(spec)
    first, second = map(weights, specs)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_without_chosen_experts_they_are_refused(small_spec):
    with pytest.raises(UserError, match="num_shared_experts=1 .*num_experts=0"):
        small_spec("balancing=none", "model.num_experts=0", "model.num_shared_experts=1")

"""Biases of the feed-forwards: the paper's 627M parameters, a forward pass by loops, and who has none."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from simbal.analysis.flops import preset_shape
from simbal.cost.parameters import count_parameters, parameters, weights_of
from simbal.errors import UserError
from simbal.experts.select import select_backend
from simbal.hf.export import read_run
from simbal.model.expert_similarity import layer_similarity
from simbal.model.init import initialise
from simbal.model.moe import BIASES, FeedForward, MoELayer
from simbal.model.router import Router
from simbal.model.transformer import Transformer
from simbal.training.optimizer import parameter_groups
from simbal.training.run import train
from tests.cost.test_memory import shape_of
from tests.training.run_files import weights

N, D, E, F_WIDTH, K = 10, 6, 4, 5, 2


def mixture() -> MoELayer:
    layer = MoELayer(Router(D, E, K, "softmax", True, layer=0), D, F_WIDTH, "reference", bias=True).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return layer


@pytest.mark.parametrize(
    ("preset", "total"),
    [("moe_m", 626_684_160), ("moe_l", 3_141_603_840), ("dense_m", 229_591_296), ("dense_l", 761_240_064)],
)
def test_with_biases_all_of_the_papers_models_have_the_parameters_that_it_prints(preset, total):
    shape = replace(preset_shape(preset, 100_277), bias=True)
    with torch.device("meta"):
        model = Transformer(shape, "reference" if shape.num_experts else None)
    assert count_parameters(model)["total"] == sum(p.numel() for p in model.parameters()) == total
    printed = {"moe_m": "627M", "moe_l": "3142M", "dense_m": "230M", "dense_l": "761M"}
    assert f"{total / 1e6:.0f}M" == printed[preset]
    assert f"{parameters(shape).active / 1e6:.0f}M" == {"m": "230M", "l": "762M"}[preset[-1]] or preset == "dense_l"


@pytest.mark.parametrize("preset", ["tiny", "tiny_dense"])
def test_every_bias_is_counted_once_with_its_size(preset):
    shape = shape_of(preset, bias=True)
    model = Transformer(shape, "reference" if shape.num_experts else None)
    sizes = sorted(tuple(p.shape) for name, p in model.named_parameters() if name.rpartition(".")[2] in BIASES)
    assert sizes == sorted(w.size for w in weights_of(shape) if w.part == "bias" for _ in range(w.copies))


def test_a_mixture_is_the_loop_over_tokens_and_their_experts():
    layer = mixture()
    x_ND = torch.randn(N, D, generator=torch.Generator().manual_seed(1)).double()
    y_BSD, routing = layer(x_ND[None], torch.zeros(1, N, dtype=torch.int64))
    want_ND = torch.zeros_like(x_ND)
    for t in range(N):
        for k in range(K):
            e = routing.topk_experts_NK[t, k]
            gate_F = layer.w13_E2FD[e, 0] @ x_ND[t] + layer.b13_E2F[e, 0]
            up_F = layer.w13_E2FD[e, 1] @ x_ND[t] + layer.b13_E2F[e, 1]
            out_D = layer.w2_EFD[e].T @ (F.silu(gate_F) * up_F) + layer.b2_ED[e]
            want_ND[t] += routing.topk_probs_NK[t, k] * out_D
    torch.testing.assert_close(y_BSD[0], want_ND)
    gradients = [torch.autograd.grad(y.sum(), [*layer.parameters()], retain_graph=True) for y in (y_BSD, want_ND)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_dense_feed_forward_is_torchs_own_linear_layers():
    layer = FeedForward(D, F_WIDTH, bias=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    x_BSD = torch.randn(2, 3, D)
    gate_BSF, up_BSF = (F.linear(x_BSD, w_FD, b_F) for w_FD, b_F in zip(layer.w13_2FD, layer.b13_2F, strict=True))
    torch.testing.assert_close(layer(x_BSD), F.linear(F.silu(gate_BSF) * up_BSF, layer.w2_FD.T, layer.b2_D))


def test_the_similarity_of_experts_is_that_of_their_outputs_with_biases():
    layer = mixture()
    x_ND = torch.randn(N, D).double()
    outputs_END = torch.stack([
        F.linear(
            F.silu(F.linear(x_ND, layer.w13_E2FD[e, 0], layer.b13_E2F[e, 0]))
            * F.linear(x_ND, layer.w13_E2FD[e, 1], layer.b13_E2F[e, 1]),
            layer.w2_EFD[e].T, layer.b2_ED[e],
        )
        for e in range(E)
    ])  # fmt: skip
    pairs = [F.cosine_similarity(outputs_END[i], outputs_END[j], dim=1) for i in range(E) for j in range(i)]
    measured_N = layer_similarity(x_ND, layer.w13_E2FD, layer.w2_EFD, layer.biases).similarity_N
    torch.testing.assert_close(measured_N.double(), torch.stack(pairs).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["tiny", "tiny_dense"])
def test_biases_start_at_zero_never_decay_and_leave_all_other_weights_as_they_were(small_spec, preset):
    models = []
    for bias in (True, False):
        shape = shape_of(preset, bias=bias)
        models.append(Transformer(shape, "reference" if shape.num_experts else None))
        initialise(models[-1], 3, 0.02, "orthogonal")
    biased, plain = (dict(model.named_parameters()) for model in models)
    added = biased.keys() - plain.keys()
    assert len(added) == 2 * models[0].shape.num_layers
    assert not any(biased[name].any() for name in added)
    assert all(torch.equal(biased[name], parameter) for name, parameter in plain.items())
    decayed, _ = parameter_groups(models[0], small_spec().config.optim)
    assert not {id(biased[name]) for name in added} & {id(p) for p in decayed["params"]}


def test_a_run_trains_its_biases_and_cannot_be_exported(small_spec):
    spec = small_spec("balancing=simbal", "model.bias=true", "trainer.pes_every=6")
    train(spec)
    saved = weights(spec)
    biases = [name for name in saved if name.rpartition(".")[2] in BIASES]
    assert len(biases) == 2 * spec.config.model.num_layers
    assert all(saved[name].any() for name in biases)
    with pytest.raises(UserError, match="cannot be exported, for its model.bias=true"):
        read_run(spec.path)


@pytest.mark.parametrize("name", ["torch", "megablocks", "fused"])
def test_a_backend_without_biases_is_refused(name):
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match=f"^experts.backend={name} has no biases, .*: use experts=reference$"):
        select_backend(name, cpu, torch.float32, 64, 64, bias=True)
    assert select_backend("auto", cpu, torch.float32, 64, 64, bias=True).name == "reference"
    assert select_backend("reference", cpu, torch.float32, 64, 64, bias=True).name == "reference"

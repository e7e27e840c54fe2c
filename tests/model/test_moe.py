"""A mixture-of-experts layer equals loops over tokens, with biases, shared experts and ragged choices."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from simbal.conformance import batch_of, tiny_model
from simbal.cost import count_parameters, parameters
from simbal.errors import UserError
from simbal.model.expert_similarity import layer_similarity, record_similarity
from simbal.model.init import initialize
from simbal.model.moe import BIASES, FeedForward, MoELayer
from simbal.model.router import Router, Steering
from simbal.model.transformer import Transformer
from simbal.training.optimizer import parameter_groups
from simbal.training.run import train
from tests.training.run_files import weights

N, D, E, WIDTH, K, SHARED = 10, 6, 4, 5, 2, 3
IDS_BS = torch.zeros(1, N, dtype=torch.int64)


def hidden_states() -> torch.Tensor:
    return torch.randn(1, N, D, generator=torch.Generator().manual_seed(1)).double().requires_grad_()


def mixture(num_shared=0, bias=False, backend="reference", renormalize=True) -> MoELayer:
    layer = MoELayer(Router(D, E, K, "softmax", renormalize, layer=0), D, WIDTH, backend, bias, num_shared).double()
    generator = torch.Generator().manual_seed(0)  # shared experts are last
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return layer


def swiglu(x_D, w13_2FD, w2_FD, b13_2F, b2_D):
    gate_F, up_F = (w_FD @ x_D + b_F for w_FD, b_F in zip(w13_2FD, b13_2F, strict=True))
    return w2_FD.T @ (F.silu(gate_F) * up_F) + b2_D


def assert_same_gradients(outputs, leaves):
    dy = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((y * dy).sum(), leaves, retain_graph=True) for y in outputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_shared", [0, SHARED])
def test_a_layer_equals_a_loop_over_tokens_and_their_chosen_and_shared_experts(bias, num_shared):
    layer, x_BSD = mixture(num_shared, bias), hidden_states()
    y_BSD, routing = layer(x_BSD, IDS_BS)
    zeros = torch.zeros(E, 2, WIDTH).double(), torch.zeros(E, D).double()
    b13_E2F, b2_ED = layer.biases or zeros
    rows = []
    for x_D, experts_K, weights_K in zip(x_BSD[0], routing.topk_experts_NK, routing.topk_probs_NK, strict=True):
        terms = []
        for e, p in zip(experts_K, weights_K, strict=True):
            terms.append(p * swiglu(x_D, layer.w13_E2FD[e], layer.w2_EFD[e], b13_E2F[e], b2_ED[e]))
        for i in range(num_shared):
            part, shared = slice(i * WIDTH, (i + 1) * WIDTH), layer.shared
            b13_2F = shared.b13_2F[:, part] if bias else zeros[0][0]
            terms.append(swiglu(x_D, shared.w13_2FD[:, part], shared.w2_FD[part], b13_2F, torch.zeros(())))
        if bias and num_shared:
            terms.append(layer.shared.b2_D)
        rows.append(sum(terms))
    torch.testing.assert_close(y_BSD[0], torch.stack(rows))
    assert_same_gradients((y_BSD[0], torch.stack(rows)), [x_BSD, *layer.parameters()])
    assert routing.tokens_per_expert_E.sum() == N * K


class Above(Steering):
    """A token goes to every expert whose logit exceeds a threshold."""

    ragged = True

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def choice_scores(self, candidates):
        return candidates.logits_NE.masked_fill(candidates.logits_NE <= self.threshold, -torch.inf)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("threshold", [-100.0, 0.0, 0.5])
def test_a_ragged_layer_equals_the_weighted_sum_of_all_experts(backend, renormalize, threshold):
    layer, x_BSD = mixture(backend=backend, renormalize=renormalize), hidden_states()
    y_BSD, routing = layer(x_BSD, IDS_BS, Above(threshold))
    logits_NE = F.linear(x_BSD[0], layer.router.weight_ED)
    probs_NE = logits_NE.softmax(-1) * (logits_NE > threshold)
    if renormalize:
        total_N1 = probs_NE.sum(-1, keepdim=True)
        probs_NE = probs_NE / total_N1.where(total_N1 > 0, 1)
    hidden_ENF = [F.silu(x_BSD[0] @ gate.T) * (x_BSD[0] @ up.T) for gate, up in layer.w13_E2FD]
    out_END = torch.stack([h_NF @ w2_FD for h_NF, w2_FD in zip(hidden_ENF, layer.w2_EFD, strict=True)])
    expected_ND = torch.einsum("ne,end->nd", probs_NE, out_END)
    torch.testing.assert_close(y_BSD[0], expected_ND)
    assert_same_gradients((y_BSD[0], expected_ND), [x_BSD, *layer.parameters()])
    per_token_N = (routing.topk_experts_NK < E).sum(1)
    assert per_token_N.sum() == routing.tokens_per_expert_E.sum()
    assert (per_token_N.min() < per_token_N.max()) == (threshold > -100)


@pytest.mark.parametrize("bias", [False, True])
def test_without_any_chosen_expert_the_output_and_all_gradients_are_zero(bias):
    layer, x_BSD = mixture(bias=bias), hidden_states()
    y_BSD, routing = layer(x_BSD, IDS_BS, Above(1e9))
    assert not y_BSD.any()
    assert not routing.tokens_per_expert_E.any()
    gradients = torch.autograd.grad(y_BSD.sum(), [x_BSD, *layer.parameters()])
    assert not any(gradient.any() for gradient in gradients), "the ranks of FSDP wait for all gradients"


def test_a_dense_feed_forward_equals_torchs_linear_layers():
    layer = FeedForward(D, WIDTH, bias=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    x_BSD = torch.randn(2, 3, D)
    gate_BSF, up_BSF = (F.linear(x_BSD, w_FD, b_F) for w_FD, b_F in zip(layer.w13_2FD, layer.b13_2F, strict=True))
    torch.testing.assert_close(layer(x_BSD), F.linear(F.silu(gate_BSF) * up_BSF, layer.w2_FD.T, layer.b2_D))


def tiny(**changes) -> Transformer:
    shape = replace(tiny_model().shape, **changes)
    model = Transformer(shape, "reference" if shape.num_experts else None, changes.get("num_shared_experts") == 1)
    initialize(model, seed=0, std=0.3, router_init="normal")
    return model


@pytest.mark.parametrize("num_experts", [0, 6])
def test_biases_and_shared_experts_do_not_change_other_initial_weights(num_experts, small_spec):
    plain = dict(tiny(num_experts=num_experts).named_parameters())
    model = tiny(num_experts=num_experts, bias=True, num_shared_experts=3 if num_experts else 0)
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], parameter) for name, parameter in plain.items())
    biases = {name for name in named if name.rpartition(".")[2] in BIASES}
    shared = {name for name in named if ".shared." in name} - biases
    assert named.keys() == plain.keys() | biases | shared
    assert (len(biases), len(shared)) == ((8, 4) if num_experts else (4, 0))
    assert not any(named[name].any() for name in biases)
    assert all(0.2 < named[name].std() < 0.35 for name in shared)
    decayed, _ = parameter_groups(model, small_spec().config.optim)
    assert not {id(named[name]) for name in biases} & {id(p) for p in decayed["params"]}


def test_shared_experts_are_active_parameters():
    model = tiny(num_shared_experts=3)
    shape = model.shape
    plain, counted = parameters(replace(shape, num_shared_experts=0)), parameters(shape)
    shared = sum(p.numel() for name, p in model.named_parameters() if ".shared." in name)
    assert counted.total - plain.total == counted.active - plain.active == shared
    assert counted.forward_flops(8) - plain.forward_flops(8) == 2 * shared
    assert count_parameters(model)["experts"] == counted.ffn == plain.ffn + shared


def test_the_similarity_of_experts_includes_biases_and_excludes_shared_experts():
    layer, x_ND = mixture(bias=True), hidden_states()[0].detach()
    outputs_END = torch.stack([
        torch.stack([swiglu(x_D, layer.w13_E2FD[e], layer.w2_EFD[e], layer.b13_E2F[e], layer.b2_ED[e]) for x_D in x_ND])
        for e in range(E)
    ])  # fmt: skip
    pairs = [F.cosine_similarity(outputs_END[i], outputs_END[j], dim=1) for i in range(E) for j in range(i)]
    measured_N = layer_similarity(x_ND, layer.w13_E2FD, layer.w2_EFD, layer.biases).similarity_N
    torch.testing.assert_close(measured_N.double(), torch.stack(pairs).mean(0), rtol=1e-5, atol=1e-6)
    seen = []
    for number in (0, 3):
        model = tiny(num_shared_experts=number)
        with torch.no_grad(), record_similarity(model.feed_forwards[:1]) as similarity:
            model(batch_of(0)[:, :-1])
        seen.append(similarity.similarity_LN)
    assert torch.equal(*seen)


def test_a_run_trains_biases_and_shared_experts(small_spec):
    keys = ("model.bias=true", "model.num_shared_experts=2", "trainer.max_steps=3", "trainer.val_every=3")
    spec = small_spec("balancing=lbl", *keys, "trainer.pes_every=3")
    train(spec)
    saved = weights(spec)
    biases = [name for name in saved if name.rpartition(".")[2] in BIASES]
    assert len(biases) == 4 * spec.config.model.num_layers
    assert all(saved[name].any() for name in biases)
    assert len([name for name in saved if ".shared.w" in name]) == 2 * spec.config.model.num_layers


def test_shared_experts_without_chosen_experts_are_refused(small_spec):
    with pytest.raises(UserError, match="num_shared_experts"):
        small_spec("balancing=none", "model.num_experts=0", "model.num_shared_experts=1")

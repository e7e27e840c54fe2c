"""Parameter counts, FLOPs and estimated memory of a step agree with torch."""

import contextlib
import gc
import itertools
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from simbal.analysis.flops import read_option
from simbal.cost import Step, activation_bytes, count, device_memory, parameters, weights_of
from simbal.model.head import head_loss
from simbal.model.init import initialize
from simbal.model.transformer import Transformer, TransformerShape

OPTIONS = st.fixed_dictionaries({
    "num_kv_heads": st.sampled_from([None, 1, 2, 4]), "head_dim": st.sampled_from([None, 6, 80]),
    "qk_norm": st.sampled_from(["none", "head", "projection"]), "tie_embeddings": st.booleans(), "bias": st.booleans(),
    "num_shared_experts": st.integers(0, 3), "token_table": st.booleans(),
    "router_input": st.sampled_from(["hidden", "embedding"]),
})  # fmt: skip


def shape_of(preset, **changes):
    numbers = read_option("model", preset)
    del numbers["init_std"], numbers["kernels"]
    return TransformerShape(**{"vocab_size": 512, "gating": "softmax", "renormalize": True} | numbers | changes)


def check_counts(shape):
    with torch.device("meta"):
        model = Transformer(shape, "reference" if shape.num_experts else None)
    counted = Counter()
    for each in weights_of(shape):
        counted[each.size] += each.copies
    assert counted == Counter(tuple(parameter.shape) for parameter in model.parameters())
    assert count(weights_of(shape)) == sum(parameter.numel() for parameter in model.parameters())
    assert count(weights_of(shape), "router") == sum(router.weight_ED.numel() for router in model.routers)


@pytest.mark.parametrize("preset", ["bench", "tiny", "tiny_dense", "small", "dense_m", "moe_m", "moe_l"])
def test_every_parameter_of_a_preset_is_counted_once_with_its_size(preset):
    check_counts(replace(shape_of(preset), num_layers=3))


@given(preset=st.sampled_from(["tiny", "tiny_dense"]), options=OPTIONS)
def test_every_parameter_is_counted_for_all_options_of_the_model(preset, options):
    check_counts(shape_of(preset, **options))


@torch.no_grad()
@given(preset=st.sampled_from(["tiny", "tiny_dense"]), options=OPTIONS)
@hypothesis_settings(max_examples=10)
def test_flops_equal_torchs_counter_with_attention_to_every_position(preset, options):
    shape = shape_of(preset, **(options | {"num_layers": 2, "vocab_size": 61, "bias": False}))
    model = Transformer(shape, "reference" if shape.num_experts else None)
    initialize(model, 0, 0.02, "normal")
    B, S = 2, 7
    plain = patch("simbal.model.matmul.onednn_is_faster", lambda: False)  # the counter does not know oneDNN's products
    with plain, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.arange(B * S).view(B, S))[0] @ model.head_VD.T
    masked = (2 * S - (S + 1)) * 2 * shape.num_layers * shape.num_heads * shape.head_width  # per token
    assert counter.get_total_flops() == B * S * (parameters(shape).forward_flops(S) + masked)


def build(shape, step):
    model = Transformer(shape, "torch" if shape.num_experts else None)
    initialize(model, 0, 0.02, "normal")
    return model.bfloat16() if step.precision == "bf16-true" else model


def loss_of(model, step):
    tokens = torch.randint(0, model.shape.vocab_size, (step.micro_batch, step.seq_len + 1))
    mixed = step.precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
        hidden, routings = model(tokens[:, :-1])
        loss = head_loss(hidden.flatten(0, 1), model.head_VD, tokens[:, 1:].flatten(), 1e-5).loss
    return loss, routings  # training holds both until the backward pass


def saved_bytes(shape, step):
    """Bytes of all storages that autograd saves, without parameters."""
    model = build(shape, step)
    saved = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model, step)
    return sum(storage.nbytes() for storage in saved.values())


def peak_bytes(shape, step, micro_batches):
    """The most bytes that a training step allocates, with weights and moments."""
    model = build(shape, step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train():
        for _ in range(micro_batches):
            loss, routings = loss_of(model, step)
            loss.backward()
            del loss, routings
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    train()
    optimizer.zero_grad()
    gc.collect()  # garbage of other tests would be freed, and counted, during the measurement
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        train()
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(allocated) + 3 * sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "changes", "precision"),
    [
        ("tiny", {}, "32-true"),
        ("tiny", {}, "bf16-mixed"),
        ("tiny", {"num_layers": 2, "d_model": 32, "num_experts": 64, "top_k": 8, "d_expert": 16}, "bf16-true"),
        ("tiny", {"num_shared_experts": 3}, "bf16-mixed"),
        ("tiny", {"router_input": "embedding", "token_table": True}, "32-true"),
        ("tiny_dense", {}, "bf16-true"),
        ("tiny_dense", {"num_kv_heads": 2, "head_dim": 48}, "bf16-mixed"),
        ("tiny_dense", {"qk_norm": "projection", "num_kv_heads": 1, "tie_embeddings": True}, "32-true"),
        ("tiny", {"qk_norm": "head", "num_kv_heads": 1, "head_dim": 40}, "bf16-mixed"),
    ],
)
def test_activations_are_within_fifteen_percent_of_what_autograd_saves(preset, changes, precision):
    shape, step = shape_of(preset, **changes), Step(2, 96, False, precision)
    assert activation_bytes(shape, step) == pytest.approx(saved_bytes(shape, step), rel=0.15)


@pytest.mark.parametrize(
    ("preset", "vocab_size", "micro_batch", "seq_len", "micro_batches", "precision"),
    [
        ("tiny", 512, 4, 64, 1, "32-true"),
        ("tiny_dense", 512, 2, 64, 3, "bf16-mixed"),
        ("tiny_dense", 4096, 2, 128, 1, "bf16-true"),
        ("tiny_dense", 4096, 2, 128, 1, "32-true"),
        pytest.param("small", 4096, 2, 128, 2, "32-true", marks=pytest.mark.slow),
        pytest.param("tiny", 4096, 4, 256, 2, "bf16-true", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_step_is_within_twenty_percent_of_what_torch_allocates(
    preset, vocab_size, micro_batch, seq_len, micro_batches, precision
):
    shape, step = shape_of(preset, vocab_size=vocab_size), Step(micro_batch, seq_len, micro_batches > 1, precision)
    assert device_memory(shape, step).peak == pytest.approx(peak_bytes(shape, step, micro_batches), rel=0.2)


def test_weights_gradients_and_moments_take_16_bytes_per_parameter_or_8_in_bf16():
    shape = shape_of("tiny", vocab_size=4096)
    for precision, size in {"32-true": 4, "bf16-mixed": 4, "bf16-true": 2}.items():
        memory = device_memory(shape, Step(4, 256, False, precision))
        assert (memory.weights, memory.gradients, memory.moments) == tuple(size * n * 2_892_928 for n in (1, 1, 2))


def test_muon_keeps_one_number_per_weight_of_attention_and_experts_and_two_of_all_others():
    shape = shape_of("tiny", vocab_size=4096)
    matrices = 4 * (4 * 128 * 128 + 16 * 3 * 64 * 128)
    assert device_memory(shape, Step(4, 256, False, muon=True)).moments == 4 * (2 * 2_892_928 - matrices)

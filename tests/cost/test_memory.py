"""The estimate of a step's memory beside what autograd keeps and what torch allocates."""

import contextlib
import gc
import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from simbal.analysis.flops import read_option
from simbal.config.schema import OptimConfig
from simbal.cost.memory import Step, activation_bytes, device_memory
from simbal.model.head import head_loss
from simbal.model.init import initialise
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.optimizer import build_optimizer

PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]
STEPS = [  # preset, vocab_size, micro_batch, seq_len, micro_batches
    ("small", 4096, 2, 128, 2),
    ("tiny", 512, 4, 64, 1),
    ("tiny_dense", 512, 2, 64, 3),
    ("tiny", 4096, 4, 256, 2),
    ("tiny_dense", 4096, 2, 128, 1),
]


def shape_of(preset, **changes):
    numbers = read_option("model", preset)
    del numbers["init_std"]
    return TransformerShape(**{"vocab_size": 512, "gating": "softmax", "renormalize": True} | numbers | changes)


def build(shape, step):
    model = Transformer(shape, "torch" if shape.num_experts else None)
    initialise(model, 0, 0.02, "normal")
    return model.bfloat16() if step.precision == "bf16-true" else model


def loss_of(model, step):
    tokens = torch.randint(0, model.shape.vocab_size, (step.micro_batch, step.seq_len + 1))
    mixed = step.precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
        hidden, routings = model(tokens[:, :-1])
        loss = head_loss(hidden.flatten(0, 1), model.head_VD, tokens[:, 1:].flatten(), 1e-5).loss
    return loss, routings  # as training holds them until the backward pass


def kept_bytes(shape, step):
    """Of every storage that autograd keeps, once, less the parameters."""
    model = build(shape, step)
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model, step)
    return sum(storage.nbytes() for storage in kept.values())


def peak_bytes(shape, step, micro_batches):
    """Of all that a training step after the first allocates, and of weights and moments."""
    model = build(shape, step)
    optimizer, _ = build_optimizer(
        model,
        OptimConfig(
            lr=1e-3,
            weight_decay=0.1,
            betas=[0.9, 0.95],
            eps=1e-8,
            decay_router=False,
            warmup_steps=1,
            z_loss_coef=0,
            grad_clip=0,
            aux_layer_reduce="sum",
        ),
        3,
    )

    def train():
        for _ in range(micro_batches):
            loss, routings = loss_of(model, step)
            loss.backward()
            del loss, routings
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def peak():
        optimizer.zero_grad()
        gc.collect()  # what other tests have left would be freed, and counted, while this one measures
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            train()
        events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

    train()
    least = min(peak() for _ in range(2))  # slipcover keeps what frames hold in the one step in which it leaves them
    return least + 3 * sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("tiny", {}),
        ("tiny", {"num_layers": 2, "d_model": 32, "num_experts": 64, "top_k": 8, "d_expert": 16}),
        ("tiny", {"num_shared_experts": 3}),
        ("tiny_dense", {}),
        ("small", {"num_layers": 2}),
        ("tiny_dense", {"num_kv_heads": 2, "head_dim": 48}),
        ("tiny_dense", {"qk_norm": "projection", "num_kv_heads": 1, "tie_embeddings": True}),
        ("tiny", {"qk_norm": "head", "num_kv_heads": 1, "head_dim": 40}),
    ],
)
def test_activations_are_within_fifteen_percent_of_what_autograd_keeps(preset, changes, precision):
    shape, step = shape_of(preset, **changes), Step(2, 96, False, precision)
    assert activation_bytes(shape, step) == pytest.approx(kept_bytes(shape, step), rel=0.15)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("preset", "vocab_size", "micro_batch", "seq_len", "micro_batches"), STEPS)
def test_the_peak_of_a_step_is_within_twenty_percent_of_what_torch_allocates(
    preset, vocab_size, micro_batch, seq_len, micro_batches, precision
):
    shape, step = shape_of(preset, vocab_size=vocab_size), Step(micro_batch, seq_len, micro_batches > 1, precision)
    assert device_memory(shape, step).peak == pytest.approx(peak_bytes(shape, step, micro_batches), rel=0.2)


def test_weights_gradients_and_moments_are_sixteen_bytes_a_parameter_and_half_of_it_in_bf16():
    shape = shape_of("tiny", vocab_size=4096)
    for precision, size in {"32-true": 4, "bf16-mixed": 4, "bf16-true": 2}.items():
        cost = device_memory(shape, Step(4, 256, False, precision))
        assert (cost.weights, cost.gradients, cost.moments) == tuple(size * n * 2_892_928 for n in (1, 1, 2))

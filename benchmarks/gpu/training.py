"""A full training step of a model preset, eager and compiled, for `gpu_check.py`.

The step has a forward pass, chunked head, backward pass, clipping and AdamW in the precision of the paper's presets
(bf16-true), without a balancing loss and without reading data.
"""

import statistics
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.timing import Clock
from simbal.analysis.flops import preset_shape
from simbal.config.schema import OptimConfig
from simbal.cost import parameters
from simbal.model.head import head_loss
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.build import compile_blocks
from simbal.training.optimizer import build_optimizer

OPTIM = OptimConfig(
    lr=5e-4,
    weight_decay=0.01,
    betas=[0.9, 0.95],
    eps=1e-8,
    decay_router=True,
    warmup_steps=2000,
    z_loss_coef=1e-5,
    grad_clip=1.0,
    aux_layer_reduce="sum",
    algorithm="adamw",
    momentum=0.95,
    muon_router=False,
    schedule="cosine",
    decay_fraction=0.2,
    mup=False,
    mup_base_width=768,
    mup_base_head_dim=96,
)


@dataclass(frozen=True)
class Step:
    """Medians over training steps."""

    milliseconds: float
    tokens_per_second: float
    tflops: float  # the model's training FLOPs (3 times forward), not the executed FLOPs
    peak_gib: float | None


def smoke_shape() -> TransformerShape:
    """Return a shape that is small enough for Triton's interpreter."""
    return replace(
        preset_shape("moe_m", 512), num_layers=1, d_model=128, num_heads=2, d_expert=128, num_experts=2, top_k=1
    )


def time_step(
    shape: TransformerShape, backend: str, batch: int, seq_len: int, device: torch.device, dtype: torch.dtype,
    compiled: bool, repeats: int,
) -> Step:  # fmt: skip
    """Time `repeats` steps on random tokens; `compiled` is trainer.compile."""
    with device:  # simbal.model.init would take minutes on the CPU, and times do not depend on the values
        model = Transformer(shape, backend if shape.num_experts else None)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
    model = model.to(dtype)
    optimizer, _ = build_optimizer(model, OPTIM, 19_000)
    if compiled:
        compile_blocks(model)
    tokens_BT = torch.randint(shape.vocab_size, (batch, seq_len + 1), device=device)
    clock, times = Clock(device), []

    def run() -> None:
        hidden_BSD, _ = model(tokens_BT[:, :-1])
        loss = head_loss(hidden_BSD.flatten(0, 1), model.head_VD, tokens_BT[:, 1:].flatten(), 1e-5)
        loss.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5 if device.type == "cuda" else 0):
        run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        begin = clock.now()
        run()
        times.append(clock.milliseconds(begin, clock.now()))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    ms, tokens = statistics.median(times), batch * seq_len
    flops = parameters(shape).training_flops(seq_len, tokens)
    return Step(ms, tokens / ms * 1e3, flops / ms / 1e9, peak_gib)

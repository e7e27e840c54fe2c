"""A few optimizer steps of a tiny model without a Trainer: whole, in micro-batches, over ranks, recomputed."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from simbal.balancing.base import Balancing
from simbal.balancing.composition import Composition
from simbal.config.schema import OptimConfig
from simbal.conformance.case import SIZES, Case
from simbal.distributed import sum_over_ranks, world_size
from simbal.model.init import initialise
from simbal.model.transformer import Transformer, TransformerShape
from simbal.training.module import LitMoE, StepResult

B, S, V = 4, 8, 32
LR = 0.1


def tiny_model(gating: str = "softmax") -> Transformer:
    """Return a model of two layers and six experts, the same at every call."""
    shape = TransformerShape(
        vocab_size=V, d_model=16, num_heads=2, d_expert=8, top_k=2, rope_theta=1e4, norm_eps=1e-5, gating=gating,
        renormalize=gating != "relu", num_layers=SIZES["num_layers"], num_experts=SIZES["num_experts"],
    )  # fmt: skip
    model = Transformer(shape, "torch")
    initialise(model, seed=0, std=0.3, router_init="normal")
    return model


def tiny_module(case: Case) -> LitMoE:
    """Return `case` at a coefficient that shows, on a model whose routers start away from every optimum."""
    return module_of(case.make(), case.gating)


def module_of(strategy: Balancing, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with a strategy, at a coefficient of 1 if it has one."""
    if strategy.coef:
        strategy.coef = 1.0
    return composed_module(Composition({"it": strategy}, {}), gating)


def composed_module(balancing: Composition, gating: str = "softmax") -> LitMoE:
    """Return the tiny model with strategies as they are."""
    model = tiny_model(gating)
    balancing.prepare(model.routers)
    optim = OptimConfig(LR, 0.0, [0.9, 0.95], 1e-8, True, 0, z_loss_coef=0.0, grad_clip=0.0, aux_layer_reduce="sum")
    return LitMoE(model, balancing, optim, 100, torch.ones(V, dtype=torch.int64))


def batch_of(step: int) -> Tensor:
    """Return the windows of tokens of a step, the same at every call."""
    return torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(step))


def recompute(module: LitMoE) -> None:
    """Forget each block's activations and compute them again for the backward pass."""
    for block in module.model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


def train(module: LitMoE, steps: range, micro_batches: int = 1, rank: int = 0) -> list[StepResult]:
    """Train by SGD; each rank, and each micro-batch, takes every so-many-th sequence."""
    optimizer = torch.optim.SGD(module.model.parameters(), LR)
    finished = []
    for step in steps:
        mine_BT = batch_of(step)[rank :: world_size()]
        chunks = [mine_BT[first::micro_batches] for first in range(micro_batches)]
        if module.balancing.needs_step_counts and micro_batches > 1:
            module.count_step(chunks)
        for chunk_BT in chunks:
            (module.training_step(chunk_BT, 0)["loss"] / micro_batches).backward()
        if world_size() > 1:
            average_gradients(module)
        optimizer.step()
        optimizer.zero_grad()
        finished.append(module.finish_step(step, LR))
    return finished


def average_gradients(module: LitMoE) -> None:
    """Give every rank the mean of the gradients of all."""
    gradients = [parameter.grad for parameter in module.model.parameters() if parameter.grad is not None]
    total = sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, mean in zip(gradients, torch.split(total, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient) / world_size())


def outcome(module: LitMoE) -> dict[str, Tensor]:
    """Return the routers' weights and the strategies' state."""
    weights = {f"router.{i}": router.weight_ED.detach() for i, router in enumerate(module.model.routers)}
    return {**weights, **state(module)}


def state(module: LitMoE) -> dict[str, Tensor]:
    """Return a copy of the strategies' state."""
    return {name: tensor.clone() for name, tensor in module.balancing.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor], exactly: bool = False) -> bool:
    """Whether two outcomes are equal: to the last bit if `exactly`, else to rounding."""
    assert first.keys() == second.keys()
    pairs = [(first[key], second[key]) for key in first]
    if exactly:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5) for a, b in pairs)

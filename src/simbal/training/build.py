"""Builds the objects of a run from its config: device, precision, backend, module and data."""

from pathlib import Path

import torch

from simbal.balancing.composition import Composition, build_balancing
from simbal.config.values import one_of
from simbal.data.loader import TokenData
from simbal.data.store import Store
from simbal.errors import UserError
from simbal.experts.select import BackendChoice, select_backend
from simbal.model.init import generator, init_router, initialise
from simbal.model.moe import MoELayer
from simbal.model.transformer import Transformer, TransformerShape
from simbal.runs.spec import RunSpec
from simbal.training.failures import memory_errors
from simbal.training.module import LitMoE

CPU_FLAGS = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last on Arm
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


def resolve_device(accelerator: str, devices: int = 1) -> torch.device:
    """Return the device; `auto` takes CUDA if there is one. `UserError` if CUDA is absent or has fewer `devices`."""
    one_of("accelerator", accelerator, ("auto", "cpu", "cuda"))  # evaluate.py has no schema
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=cuda, but no CUDA device is visible: use cpu or auto")
    cuda = accelerator == "cuda" or (accelerator == "auto" and torch.cuda.is_available())
    if cuda and torch.cuda.device_count() < devices:
        raise UserError(
            f"trainer.devices={devices}, but {torch.cuda.device_count()} of CUDA are visible: use fewer, or in a sweep "
            "give each job several, as by hydra.launcher.gpus=[0+1,2+3]"
        )
    return torch.device("cuda" if cuda else "cpu")


def resolve_precision(precision: str, device: torch.device, force: bool = False) -> str:
    """Return the precision; `auto` is 32-true on a CPU and bf16-mixed on CUDA.

    Raises:
        UserError: bf16 on a CPU that has no instructions for it, unless `force`.
    """
    if precision == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    if PRECISIONS[precision] == torch.bfloat16 and device.type == "cpu" and not (force or cpu_multiplies_bf16()):
        raise UserError(
            f"trainer.precision={precision} can be 100 times slower than 32-true here, as this CPU has no bf16 "
            "instructions: use trainer.precision=32-true, or trainer.force_precision=true to train so all the same"
        )
    return precision


def cpu_multiplies_bf16() -> bool:
    """Whether Linux lists instructions for bf16; false on another system, which does not say."""
    try:
        flags = set(CPU_FLAGS.read_text(encoding="utf-8").split())
    except OSError:  # not Linux
        return False
    return bool(flags & BF16_FLAGS)


def resolve_router_init(init: str, balancing: Composition) -> str:
    """Return how the router starts; `auto` is the start that the strategies prefer."""
    return balancing.router_init if init == "auto" else init


def choose_backend(spec: RunSpec, device: torch.device, precision: str) -> BackendChoice | None:
    """Return the backend of the experts, and why; None for a dense model."""
    model = spec.config.model
    if not model.num_experts:
        return None
    named = spec.config.experts.backend
    return select_backend(named, device, PRECISIONS[precision], model.d_model, model.d_expert, model.bias)


def transformer_shape(spec: RunSpec, end_of_text: int) -> TransformerShape:
    """Return the model's shape, from the `model` and `router` keys and what of `data` shapes the model."""
    model, router = spec.config.model, spec.config.router
    return TransformerShape(
        num_layers=model.num_layers,
        d_model=model.d_model,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        qk_norm=model.qk_norm,
        tie_embeddings=model.tie_embeddings,
        d_expert=model.d_expert,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_shared_experts=model.num_shared_experts,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        bias=model.bias,
        vocab_size=spec.config.data.vocab_size,
        gating=router.gating,
        renormalize=router.renormalize,
        document_end=end_of_text if spec.config.data.document_mask else None,
    )


@memory_errors()
def build_module(spec: RunSpec, store: Store, device: torch.device, precision: str) -> LitMoE:
    """Return the model with its initial weights, the strategies and the optimizer settings.

    Raises:
        UserError: memory has no room for it, or a strategy refuses its keys.
    """
    optim, trainer = spec.config.optim, spec.config.trainer
    shape = transformer_shape(spec, store.meta["eot"])
    balancing = build_strategies(spec, shape)
    choice = choose_backend(spec, device, precision)
    model = Transformer(shape, choice.name if choice else None, trainer.activation_checkpointing)
    router_init = resolve_router_init(spec.config.router.init, balancing)
    initialise(model, spec.config.seed, spec.config.model.init_std, router_init)
    balancing.prepare(model.routers)
    if trainer.compile:
        compile_blocks(model)
    bytes_of_token_V = torch.from_numpy(store.byte_len.astype("int64"))
    return LitMoE(model, balancing, optim, trainer.max_steps, bytes_of_token_V, trainer.skip_nonfinite)


def check_buildable(spec: RunSpec, here: bool) -> None:
    """Raise `UserError` for what the run would refuse when it starts: build it as the run does, but without memory.

    Weights are on the meta device, except those of the routers, which some strategies look at.

    Args:
        spec: the run.
        here: whether it would run on this machine, whose devices and backends then count.
    """
    trainer, shape, choice = spec.config.trainer, transformer_shape(spec, end_of_text=0), None
    balancing = build_strategies(spec, shape)
    if here:
        device = resolve_device(trainer.accelerator, trainer.devices)
        choice = choose_backend(spec, device, resolve_precision(trainer.precision, device, trainer.force_precision))
    with torch.device("meta"):
        model = Transformer(shape, choice.name if choice else "reference", trainer.activation_checkpointing)
    for router in model.routers:
        router.to_empty(device="cpu")
        router_init = resolve_router_init(spec.config.router.init, balancing)
        init_router(router.weight_ED, router_init, spec.config.model.init_std, generator(spec.config.seed, "router"))
    balancing.prepare(model.routers)


def build_strategies(spec: RunSpec, shape: TransformerShape) -> Composition:
    """Return the strategies of the config's group; `UserError` if one refuses its keys, or how the run is trained."""
    facts = {"num_layers": shape.num_layers, "num_experts": shape.num_experts, "seed": spec.config.seed}
    group, trainer = spec.config.balancing, spec.config.trainer
    balancing = build_balancing(group, facts, trainer.max_steps, spec.config.optim.aux_layer_reduce, spec.trusted)
    if trainer.strategy == "fsdp" and trainer.devices > 1:
        require_no_experts_seen(balancing)
    return balancing


def require_no_experts_seen(balancing: Composition) -> None:
    """Raise `UserError` if a strategy looks at experts' weights: fsdp has given them up when a loss is computed."""
    for name, part in balancing.parts.items():
        if part.needs_experts:
            raise UserError(
                f"balancing.{name} needs the weights of all experts, of which trainer=fsdp leaves each device a part: "
                "use trainer=ddp"
            )


def compile_blocks(model: Transformer) -> None:
    """Compile the blocks by torch.compile; names of weights stay.

    Left out are the experts' products, which inductor cannot lower on a CPU, and the routers: each knows its layer, so
    that every block would be compiled anew, and from the ninth on not at all.
    """
    for layer in model.feed_forwards:
        if isinstance(layer, MoELayer):
            layer.apply_experts = torch.compiler.disable(layer.apply_experts)
            layer.router.forward = torch.compiler.disable(layer.router.forward)  # type: ignore[method-assign]
    for block in model.blocks:
        block.compile()


def build_data(spec: RunSpec, store: Store) -> TokenData:
    """Return the data of the run: batches of `global_batch` sequences in micro-batches, and validation windows."""
    data, trainer = spec.config.data, spec.config.trainer
    return TokenData(
        store,
        seed=spec.config.data_seed,
        seq_len=data.seq_len,
        global_batch=trainer.global_batch,
        micro_batch=trainer.micro_batch,
        max_steps=trainer.max_steps,
        validation_tokens=data.validation_tokens,
        validation_document_tokens=data.validation_document_tokens,
        devices=trainer.devices,
    )

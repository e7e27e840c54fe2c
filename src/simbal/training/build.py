"""Build the objects of a run from its config: device, precision, expert backend, module and data."""

import math
from dataclasses import fields, replace
from pathlib import Path

import torch

from simbal.balancing.composition import Composition, build_balancing
from simbal.config.values import check_choice
from simbal.data.loader import TokenData
from simbal.data.store import Store
from simbal.errors import UserError
from simbal.experts.select import BackendChoice, select_backend
from simbal.model.init import generator, init_router, initialize
from simbal.model.moe import MoELayer
from simbal.model.native import select_kernels
from simbal.model.transformer import Transformer, TransformerShape
from simbal.runs.spec import RunSpec
from simbal.training.failures import out_of_memory_as_user_error
from simbal.training.module import LitMoE
from simbal.training.optimizer import mup_width_ratio

CPU_FLAGS = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # bf16 is the name on Arm
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


def resolve_device(accelerator: str, devices: int = 1) -> torch.device:
    """Return the device; `auto` is CUDA if available.

    Raises:
        UserError: CUDA is not available or has fewer than `devices` devices.
    """
    check_choice("accelerator", accelerator, ("auto", "cpu", "cuda"))  # evaluate.py has no schema
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=cuda, but no CUDA device is visible: use cpu or auto")
    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < devices:
        raise UserError(
            f"trainer.devices={devices}, but only {torch.cuda.device_count()} CUDA devices are visible: use fewer; "
            "in a sweep, give each job several devices, for example hydra.launcher.gpus=[0+1,2+3]"
        )
    return torch.device("cuda")


def resolve_precision(precision: str, device: torch.device, force: bool = False) -> str:
    """Return the precision; `auto` is 32-true on a CPU and bf16-mixed on CUDA.

    Raises:
        UserError: bf16 on a CPU without bf16 instructions, unless `force`.
    """
    if precision == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    if PRECISIONS[precision] == torch.bfloat16 and device.type == "cpu" and not (force or cpu_multiplies_bf16()):
        raise UserError(
            f"trainer.precision={precision} can be 100 times slower than 32-true on this CPU, which has no bf16 "
            "instructions: use trainer.precision=32-true, or trainer.force_precision=true to use it anyway"
        )
    return precision


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU lists bf16 instructions; False outside Linux, where this is unknown."""
    try:
        flags = set(CPU_FLAGS.read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(flags & BF16_FLAGS)


def resolve_router_init(init: str, balancing: Composition, num_layers: int) -> list[str]:
    """Return the router initialization of each layer; `auto` is the preference of the strategies."""
    return [balancing.router_init(layer) if init == "auto" else init for layer in range(num_layers)]


def choose_backend(spec: RunSpec, device: torch.device, precision: str) -> BackendChoice | None:
    """Return the expert backend and the reason for it; None for a dense model."""
    model = spec.config.model
    if not model.num_experts:
        return None
    backend = spec.config.experts.backend
    return select_backend(backend, device, PRECISIONS[precision], model.d_model, model.d_expert, model.bias)


def choose_kernels(spec: RunSpec, device: torch.device, precision: str) -> BackendChoice:
    """Return the kernels of attention and head and the reason for them."""
    return select_kernels(spec.config.model.kernels, device, PRECISIONS[precision], spec.config.trainer.compile)


def transformer_shape(spec: RunSpec, end_of_text: int) -> TransformerShape:
    """Return the shape of the model that a config describes; `end_of_text` is the token that ends a document."""
    model, router, data = spec.config.model, spec.config.router, spec.config.data
    same_names = {field.name for field in fields(TransformerShape)} & {*type(model).model_fields}
    shape = TransformerShape(
        **{name: getattr(model, name) for name in same_names},
        vocab_size=data.vocab_size,
        gating=router.gating,
        renormalize=router.renormalize,
        router_scale=router.scale,
        router_input=router.input,
        document_end=end_of_text if data.document_mask else None,
    )
    base = spec.config.optim.mup_base_head_dim
    if not spec.config.optim.mup or shape.head_width == base:
        return shape
    return replace(shape, attention_scale=math.sqrt(base) / shape.head_width)


def build_strategies(spec: RunSpec, shape: TransformerShape, store: Store | None = None) -> Composition:
    """Return the balancing strategies of a run; without the data in `store`, only to check or to inspect them.

    Raises:
        UserError: a strategy rejects its keys or cannot be trained with FSDP.
    """
    facts = {
        "num_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "seed": spec.config.seed,
        "vocab_size": shape.vocab_size,
        "end_of_text": store.meta["eot"] if store else 0,
        "token_counts": lambda: (
            torch.from_numpy(store.token_counts()) if store else torch.ones(shape.vocab_size).long()
        ),
    }
    group, trainer = spec.config.balancing, spec.config.trainer
    balancing = build_balancing(group, facts, trainer.max_steps, spec.config.optim.aux_layer_reduce, spec.trusted)
    for name, part in balancing.parts.items():
        if part.needs_experts and trainer.strategy == "fsdp" and trainer.devices > 1:
            raise UserError(
                f"balancing.{name} needs the full weights of all experts, but trainer=fsdp shards them: use trainer=ddp"
            )
    return balancing


@out_of_memory_as_user_error()
def build_module(spec: RunSpec, store: Store, device: torch.device, precision: str) -> LitMoE:
    """Return the model with its initial weights, the strategies and the optimizer settings.

    Raises:
        UserError: out of memory, or a strategy rejects its keys.
    """
    trainer = spec.config.trainer
    shape = transformer_shape(spec, store.meta["eot"])
    balancing = build_strategies(spec, shape, store)
    choice = choose_backend(spec, device, precision)
    kernels = choose_kernels(spec, device, precision).name
    model = Transformer(shape, choice.name if choice else None, trainer.activation_checkpointing, kernels)
    router_init = resolve_router_init(spec.config.router.init, balancing, len(model.routers))
    width_ratio = mup_width_ratio(spec.config.optim, shape.d_model)
    initialize(model, spec.config.seed, spec.config.model.init_std, router_init, width_ratio)
    balancing.prepare(model.routers)
    if trainer.compile:
        compile_blocks(model)
    bytes_of_token_V = torch.from_numpy(store.byte_len.astype("int64"))
    return LitMoE(model, balancing, spec.config.optim, trainer.max_steps, bytes_of_token_V, trainer.skip_nonfinite)


def check_buildable(spec: RunSpec, here: bool) -> None:
    """Check before a sweep starts that a run can be built: build it on the meta device, which needs no memory.

    Only routers get real weights, because some strategies read them.

    Args:
        spec: the run.
        here: whether the run will use this machine, so that devices and backends are checked too.

    Raises:
        UserError: the run would fail when it starts.
    """
    trainer, shape, choice = spec.config.trainer, transformer_shape(spec, end_of_text=0), None
    balancing = build_strategies(spec, shape)
    if here:
        device = resolve_device(trainer.accelerator, trainer.devices)
        precision = resolve_precision(trainer.precision, device, trainer.force_precision)
        choice = choose_backend(spec, device, precision)
        choose_kernels(spec, device, precision)
    with torch.device("meta"):
        model = Transformer(shape, choice.name if choice else "reference", trainer.activation_checkpointing)
    router_init = resolve_router_init(spec.config.router.init, balancing, len(model.routers))
    for router, kind in zip(model.routers, router_init, strict=True):
        router.to_empty(device="cpu")
        init_router(router.weight_ED, kind, spec.config.model.init_std, generator(spec.config.seed, "router"))
    balancing.prepare(model.routers)


def compile_blocks(model: Transformer) -> None:
    """Compile the transformer blocks with torch.compile, without changing the names of weights.

    Expert products are excluded because inductor cannot lower them on a CPU. Routers are excluded because each
    stores its layer index: every block would be compiled separately, and dynamo gives up at the ninth.
    """
    for layer in model.feed_forwards:
        if isinstance(layer, MoELayer):
            layer.apply_experts = torch.compiler.disable(layer.apply_experts)
            layer.router.forward = torch.compiler.disable(layer.router.forward)  # type: ignore[method-assign]
    for block in model.blocks:
        block.compile()


def build_data(spec: RunSpec, store: Store) -> TokenData:
    """Return the LightningDataModule with the training batches and the validation windows."""
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

"""From plain config dicts to the objects of a run."""

from pathlib import Path

import torch

from simbal.balancing.build import build_balancing
from simbal.balancing.composition import Composition
from simbal.data.loader import TokenData
from simbal.data.store import Store
from simbal.errors import UserError
from simbal.experts.select import Choice, choose
from simbal.model.init import initialise
from simbal.model.moe import MoELayer
from simbal.model.transformer import Transformer, TransformerShape
from simbal.run_spec import RunSpec
from simbal.training.lit_moe import LitMoE
from simbal.training.optim import OptimSettings
from simbal.training.shortage import room_for_a_model

CPU_FLAGS = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last on Arm
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


def resolve_device(accelerator: str, devices: int = 1) -> torch.device:
    """`auto` takes CUDA where there is one; `UserError` if CUDA is asked for and absent, or has fewer `devices`."""
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
    """`auto` is 32-true on a CPU and bf16-mixed on CUDA.

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
    """Whether Linux lists instructions for bf16; elsewhere nothing says so."""
    try:
        flags = set(CPU_FLAGS.read_text(encoding="utf-8").split())
    except OSError:  # not Linux
        return False
    return bool(flags & BF16_FLAGS)


def resolve_router_init(init: str, balancing: Composition) -> str:
    """`auto` is the start that the strategies prefer."""
    return balancing.router_init if init == "auto" else init


def choose_backend(spec: RunSpec, device: torch.device, precision: str) -> Choice | None:
    """What computes the experts, and why; None for a dense model."""
    model = spec.config["model"]
    if not model["num_experts"]:
        return None
    named = spec.config["experts"]["backend"]
    return choose(named, device, PRECISIONS[precision], model["d_model"], model["d_expert"])


def transformer_shape(spec: RunSpec, end_of_text: int) -> TransformerShape:
    """The `model` and `router` keys, and what of `data` shapes the model."""
    model, router = spec.config["model"], spec.config["router"]
    numbers = {key: value for key, value in model.items() if key != "init_std"}
    return TransformerShape(
        vocab_size=spec.config["data"]["vocab_size"],
        gating=router["gating"],
        renormalize=router["renormalize"],
        document_end=end_of_text if spec.config["data"]["document_mask"] else None,
        **numbers,
    )


@room_for_a_model()
def build_module(spec: RunSpec, store: Store, device: torch.device, precision: str) -> LitMoE:
    """Model with its initial weights, strategies and optimizer settings; `UserError` if memory has no room for it."""
    optim, trainer = spec.config["optim"], spec.config["trainer"]
    shape = transformer_shape(spec, store.meta["eot"])
    facts = {"num_layers": shape.num_layers, "num_experts": shape.num_experts, "seed": spec.config["seed"]}
    balancing = build_balancing(spec.config["balancing"], facts, trainer["max_steps"], optim["aux_layer_reduce"])
    choice = choose_backend(spec, device, precision)
    model = Transformer(shape, choice.name if choice else None, trainer["activation_checkpointing"])
    router_init = resolve_router_init(spec.config["router"]["init"], balancing)
    initialise(model, spec.config["seed"], spec.config["model"]["init_std"], router_init)
    balancing.prepare(model.routers)
    if trainer["compile"]:
        compile_blocks(model)
    return LitMoE(
        model,
        balancing,
        OptimSettings(
            optim["lr"], optim["weight_decay"], tuple(optim["betas"]), optim["eps"], optim["decay_router"],
            optim["warmup_steps"],
        ),
        max_steps=trainer["max_steps"],
        z_loss_coef=optim["z_loss_coef"],
        grad_clip=optim["grad_clip"],
        bytes_of_token_V=torch.from_numpy(store.byte_len.astype("int64")),
        skip_nonfinite=trainer["skip_nonfinite"],
    )  # fmt: skip


def compile_blocks(model: Transformer) -> None:
    """By torch.compile, all but the experts' products, which inductor cannot lower on a CPU; names of weights stay."""
    for layer in model.feed_forwards:
        if isinstance(layer, MoELayer):
            layer.apply_experts = torch.compiler.disable(layer.apply_experts)  # type: ignore[no-untyped-call]
    for block in model.blocks:
        block.compile()


def build_data(spec: RunSpec, store: Store) -> TokenData:
    """Batches of `global_batch` sequences in micro-batches, and the validation windows."""
    data, trainer = spec.config["data"], spec.config["trainer"]
    return TokenData(
        store,
        seed=spec.config["seed"],
        seq_len=data["seq_len"],
        global_batch=trainer["global_batch"],
        micro_batch=trainer["micro_batch"],
        max_steps=trainer["max_steps"],
        validation_tokens=data["validation_tokens"],
        devices=trainer["devices"],
    )

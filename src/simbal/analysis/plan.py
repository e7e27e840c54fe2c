"""What training a model would take on given hardware: tokens per second, days, memory, disk and money; nothing is made.

Reference: arXiv 2506.14038 for the paper's runs; FLOPs and memory are counted as in the analysis `flops`.
"""

from dataclasses import asdict, replace
from typing import Any

from simbal.analysis import plan_tables
from simbal.analysis.finding import Finding
from simbal.analysis.hardware import Hardware, hardware_of
from simbal.analysis.plan_tables import Plan, Sharing
from simbal.analysis.rates import assumed_rate, measured_rate
from simbal.analysis.recipe import Recipe, recipe_of
from simbal.analysis.training_cost import parameters
from simbal.checks import not_negative, one_of, whole_number
from simbal.errors import UserError
from simbal.model.device_memory import DeviceMemory, device_memory, largest_micro_batch, strategies
from simbal.model.memory_cost import Step

BACKENDS = ("torch", "megablocks", "fused", "reference")
DEFINITION = {
    "tokens_per_second": "of all devices: measured, or utilisation * peak FLOP/s * devices / training FLOPs per token",
    "days": "training tokens / tokens_per_second, without validations, checkpoints and the preparation of data",
    "device_hours": "24 * days * devices",
    "cost": "USD, device_hours * price_per_hour",
    "checkpoint_bytes": "weights and AdamW's two moments, in the precision they are stored in",
    "disk_bytes": "three checkpoints: two stay while the next is written",
    "memory": "bytes of a device by part, as in the analysis flops; sharing: buckets of gradients (ddp), or what is "
    "put together of other devices' parts and its gradients (fsdp)",
}


def plan(
    model: Any,
    hardware: Any,
    gpus: int | None,
    steps: int | None,
    global_batch: int | None,
    micro_batch: int | None,
    precision: str | None,
    seq_len: int | None,
    vocab_size: int | None,
    backend: str,
    utilisation: float,
    memory_share: float,
) -> Finding:
    """Say what a run takes, and of each number whether it is measured, counted or assumed.

    Args:
        model: keys of conf/model, as `model=NAME` chooses them.
        hardware: keys of conf/hardware, as `hardware=NAME` chooses them.
        gpus: how many devices; None: one.
        steps: of training; this and the next five: None means what `recipe_of` says.
        global_batch: sequences of a step, over all devices.
        micro_batch: sequences at a time on each device.
        precision: 32-true, bf16-mixed or bf16-true.
        seq_len: tokens.
        vocab_size: token ids.
        backend: of the experts, for the memory of a step.
        utilisation: share of the peak FLOP/s, above 0 and at most 1, where no rate is measured.
        memory_share: of a device's memory that a step may fill, above 0 and at most 1.

    Raises:
        UserError: no model or hardware is given, a key is out of its range, or the devices cannot share the batch.
    """
    devices = hardware_of(hardware)
    names = ("steps", "global_batch", "micro_batch", "precision", "seq_len", "vocab_size")
    given = dict(zip(names, (steps, global_batch, micro_batch, precision, seq_len, vocab_size), strict=True))
    recipe = recipe_of(model, devices.accelerator, given)
    number = 1 if gpus is None else whole_number("gpus", gpus, 1)
    _check(backend, {"utilisation": utilisation, "memory_share": memory_share})
    recipe = _shared(recipe, number, micro_batch)
    planned = _planned(recipe, devices, number, backend, utilisation, memory_share)
    return Finding(plan_tables.tables(planned), plan_tables.notes(planned), _record(planned))


def _check(backend: Any, shares: dict[str, Any]) -> None:
    one_of("analysis.plan.backend", backend, BACKENDS)
    for key, value in shares.items():
        if not 0 < not_negative(f"analysis.plan.{key}", value) <= 1:
            raise UserError(f"analysis.plan.{key}={value} must be above 0 and at most 1")


def _shared(recipe: Recipe, gpus: int, micro_batch: int | None) -> Recipe:
    """With a micro-batch that divides what each device has of the global batch; the user's own has to."""
    whole = recipe.global_batch
    if whole % gpus:
        raise UserError(
            f"gpus={gpus} cannot share the {whole} sequences of a step equally: it may be {_listed(_divisors(whole))}, "
            "or set analysis.plan.global_batch"
        )
    sequences = whole // gpus
    sizes = _divisors(sequences)
    if micro_batch is None:
        return replace(recipe, micro_batch=max(size for size in sizes if size <= recipe.micro_batch))
    if micro_batch not in sizes:
        raise UserError(
            f"analysis.plan.micro_batch={micro_batch} must divide the {sequences} sequences of a device: "
            f"it may be {_listed(sizes)}"
        )
    return recipe


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _planned(
    recipe: Recipe, hardware: Hardware, gpus: int, backend: str, utilisation: float, memory_share: float
) -> Plan:
    counted = parameters(recipe.shape)
    flops = counted.training_flops(recipe.seq_len, recipe.tokens)
    peak = hardware.peak(recipe.precision)
    rate = measured_rate(recipe, recipe.micro_batch, backend, hardware, gpus)
    rate = rate or assumed_rate(flops, recipe.tokens, peak, gpus, utilisation)
    sequences, limit = recipe.global_batch // gpus, memory_share * hardware.memory_bytes

    def step(micro_batch: int) -> Step:
        accumulates = micro_batch < sequences
        return Step(micro_batch, recipe.seq_len, accumulates, recipe.precision, backend, hardware.accelerator)

    def sharing(strategy: str) -> Sharing:
        def memory_of(micro_batch: int) -> DeviceMemory:
            return device_memory(strategy, recipe.shape, step(micro_batch), gpus)

        memory = memory_of(recipe.micro_batch)
        return Sharing(memory, memory.peak <= limit, largest_micro_batch(memory_of, sequences, limit))

    return Plan(
        recipe=recipe,
        hardware=hardware,
        gpus=gpus,
        counted=counted,
        training_flops=flops,
        rate=rate,
        peak_flops=peak,
        stored=step(1).stored,
        memory_share=memory_share,
        sharing={strategy: sharing(strategy) for strategy in strategies(gpus)},
    )


def _record(plan: Plan) -> dict[str, Any]:
    memory = {
        strategy: asdict(shared.memory.step)
        | {"sharing": shared.memory.sharing, "peak": shared.memory.peak}
        | {"fits": shared.fits, "largest_micro_batch": shared.largest_micro_batch}
        for strategy, shared in plan.sharing.items()
    }
    return {
        "definition": DEFINITION,
        "recipe": asdict(plan.recipe),
        "hardware": asdict(plan.hardware),
        "devices": plan.gpus,
        "rate": asdict(plan.rate),
        "metrics": {
            "parameters": plan.counted.total,
            "active": plan.counted.active,
            "tokens": plan.recipe.tokens,
            "training_flops": plan.training_flops,
            "tokens_per_second": plan.rate.tokens_per_second,
            "days": plan.days,
            "device_hours": plan.device_hours,
            "cost": plan.cost,
            "checkpoint_bytes": plan.checkpoint_bytes,
            "final_bytes": plan.final_bytes,
            "disk_bytes": plan.disk_bytes,
        },
        "memory": memory,
    }

"""The analysis `plan`: speed, time, memory, disk and cost of training a model on given hardware; nothing is made.

Reference: arXiv 2506.14038 for the paper's runs; FLOPs and memory are counted as in the analysis `flops`.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.table import Table

from simbal.analysis.flops import duration
from simbal.analysis.shared.finding import Finding
from simbal.config.values import divisors, whole_number
from simbal.cost.hardware import Hardware, Rate, assumed_rate, hardware_of, measured_rate
from simbal.cost.memory import DeviceMemory, Precision, Step, device_memory, largest_micro_batch, strategies
from simbal.cost.parameters import Parameters, parameters
from simbal.cost.recipe import MOST, Recipe, recipe_of
from simbal.errors import UserError
from simbal.experts.fused_blocks import config_for
from simbal.files.console import new_grid

DAY = 86_400  # seconds
ON_DISK = 3  # checkpoints: two stay while the next is written
DEFINITION = {
    "tokens_per_second": "of all devices: given, measured, or utilisation * peak FLOP/s * devices / training FLOPs per "
    "token",
    "days": "(training tokens + validation_tokens / 3 + work of PES) / tokens_per_second, as a forward pass is a third "
    "of training's FLOPs; without checkpoints and the preparation of data",
    "validation_tokens": "of all validations, of which the final one is of the whole split",
    "validation_share": "of days: validations",
    "pes_tokens": "of all measurements of PES, each of which every device makes",
    "pes_share": "of days: a token of PES costs the FLOPs of forward / those of training through all E experts",
    "device_hours": "24 * days * devices",
    "sweep_days": "days * ceil(runs / at_once), each run with tokens_per_second; without the start of their processes",
    "sweep_cost": "USD, cost * runs",
    "cost": "USD, device_hours * price_per_hour",
    "checkpoint_bytes": "weights and AdamW's two moments, in the precision they are stored in",
    "disk_bytes": "three checkpoints: two stay while the next is written",
    "memory": "bytes of a device by part, as in the analysis flops; sharing: buckets of gradients (ddp), or what is "
    "put together of other devices' parts and its gradients (fsdp)",
}


@dataclass(frozen=True)
class Plan:
    """A run on its hardware, with what it takes."""

    recipe: Recipe
    hardware: Hardware
    gpus: int
    runs: int
    at_once: int
    rate: Rate
    memory_share: float
    metrics: dict[str, float]  # as `DEFINITION` has them
    memory: dict[str, dict[str, Any]]  # of a device by strategy: bytes by part, what fits
    backend: str  # of the experts


def plan(
    model: Any,
    hardware: Any,
    gpus: int | None,
    runs: int,
    at_once: int,
    steps: int | None,
    global_batch: int | None,
    micro_batch: int | None,
    precision: Precision | None,
    seq_len: int | None,
    vocab_size: int | None,
    val_every: int | None,
    val_at: Literal["log", "none"] | None,
    validation_tokens: int | None,
    final_validation_tokens: int | None,
    pes_every: int | None,
    pes_tokens: int | None,
    backend: Literal["torch", "megablocks", "fused", "reference"] | None,
    tokens_per_second: float | None,
    utilisation: float,
    memory_share: float,
) -> Finding:
    """Say what a run takes, and of each number whether it is measured, counted or assumed.

    Args:
        model: keys of conf/model, as `model=NAME` chooses them.
        hardware: keys of conf/hardware, as `hardware=NAME` chooses them.
        gpus: how many devices; None: one.
        runs: of a sweep, each like this one.
        at_once: of these runs, each on as many devices.
        steps: of training; this and the next eleven: None means what `recipe_of` says.
        global_batch: sequences of a step, over all devices.
        micro_batch: sequences at a time on each device.
        precision: of the training.
        seq_len: tokens.
        vocab_size: token ids.
        val_every: steps between validations.
        val_at: log: also after 1, 2, 4, 8 ... steps below val_every; none: not.
        validation_tokens: of a validation along the way.
        final_validation_tokens: of the whole validation split.
        pes_every: steps between measurements of PES; 0: none.
        pes_tokens: of one of them.
        backend: of the experts; None: what experts=auto takes on such a device.
        tokens_per_second: of a run, as it was seen on these devices; None: a rate of rates.yaml, or an assumed one.
        utilisation: share of the peak FLOP/s, above 0 and at most 1, where no rate is given or measured.
        memory_share: of a device's memory that a step may fill, above 0 and at most 1.

    Raises:
        UserError: no model or hardware is given, a key is out of its range, or the devices cannot share the batch.
    """
    devices = hardware_of(hardware)
    given = {
        "steps": steps, "global_batch": global_batch, "micro_batch": micro_batch, "precision": precision,
        "seq_len": seq_len, "vocab_size": vocab_size, "val_every": val_every, "val_at": val_at,
        "validation_tokens": validation_tokens, "final_validation_tokens": final_validation_tokens,
        "pes_every": pes_every, "pes_tokens": pes_tokens,
    }  # fmt: skip
    recipe = recipe_of(model, devices.accelerator, given)
    number = 1 if gpus is None else whole_number("gpus", gpus, 1, MOST)
    for key, count in {"runs": runs, "at_once": at_once}.items():
        whole_number(f"analysis.plan.{key}", count, 1, MOST)
    for key, share in {"utilisation": utilisation, "memory_share": memory_share}.items():
        if not 0 < share <= 1:
            raise UserError(f"analysis.plan.{key}={share} must be above 0 and at most 1")
    if tokens_per_second is not None and not 0 < tokens_per_second < math.inf:
        raise UserError(f"analysis.plan.tokens_per_second={tokens_per_second} must be a finite number above 0")
    recipe = _shared(recipe, number, micro_batch)
    of_experts = backend or _automatic_backend(recipe, devices)
    rate = _rate(recipe, devices, number, of_experts, tokens_per_second, utilisation)
    planned = _planned(recipe, devices, number, (runs, at_once), of_experts, rate, memory_share)
    record = {
        "definition": DEFINITION,
        "recipe": asdict(recipe),
        "hardware": devices.model_dump(),
        "devices": number,
        "rate": asdict(planned.rate),
        "metrics": planned.metrics,
        "memory": planned.memory,
        "backend": of_experts,
    }
    return Finding([_of_run(planned), _of_memory(planned)], notes(planned), record)


def notes(plan: Plan) -> list[str]:
    """Return notes on what was not measured, and on what is left out."""
    said = [
        "Memory is counted; a step of MoE-M on an H200 took 0.83 of what is counted for it. "
        f"{plan.memory_share:.0%} of {_gb(plan.hardware.memory_bytes)} GB may be filled, an assumption "
        "(analysis.plan.memory_share).",
        "Not in the time: checkpoints, data, the start of processes. Device memory and price: conf/hardware, as in "
        "hardware.price_per_hour=2.",
    ]
    if not any(change.startswith("final_validation_tokens=") for change in plan.recipe.changed):
        said.append(
            f"That a validation split has {plan.recipe.final_validation_tokens:,} tokens is assumed "
            "(analysis.plan.final_validation_tokens)."
        )
    if not plan.rate.measured:
        said.insert(
            0, "The rate is no measurement: time, device hours and cost are as good as its assumption, which "
            "includes communication between devices (analysis.plan.utilisation)."
        )  # fmt: skip
    for strategy, memory in plan.memory.items():
        if not memory["fits"]:
            fits = memory["largest_micro_batch"]
            remedy = f"analysis.plan.micro_batch={fits} would" if fits else "nor would any micro-batch"
            said.append(f"{strategy}: a step does not fit; {remedy}.")
    return said


def _of_run(plan: Plan) -> Table:
    recipe, hardware = plan.recipe, plan.hardware
    grid = new_grid(f"training {recipe.model or 'a changed model'} on {plan.gpus} x {hardware.device}", "", "value")
    grid.add_column("how it is known")
    accumulated = recipe.global_batch // plan.gpus // recipe.micro_batch
    batch = f"{plan.gpus} x {accumulated} x {recipe.micro_batch} x {recipe.seq_len}"
    found = plan.metrics
    reached = found["training_flops"] / recipe.tokens * plan.rate.tokens_per_second
    used = reached / (plan.gpus * hardware.peak(recipe.precision))
    per = f"{found['final_bytes'] // found['parameters']} bytes a parameter ({recipe.precision})"
    rows = [
        ("parameters", f"{found['parameters']:,}", f"counted; {found['active']:,} of them active"),
        ("training tokens", f"{recipe.tokens:,}", f"{recipe.steps:,} steps: {recipe.source}"),
        ("tokens of a step", f"{batch} = {recipe.global_batch * recipe.seq_len:,}",
         "devices x accumulated micro-batches x sequences x length"),
        ("training FLOPs", f"{found['training_flops']:.4e}", "counted, as in analysis=flops"),
        ("tokens per second", f"{plan.rate.tokens_per_second:,.0f}", plan.rate.basis),
        ("share of the peak", f"{used:.1%}", "from the line above" if plan.rate.measured else "assumed"),
        *_of_validations(recipe, found),
        ("time", duration(found["days"] * DAY), "all these tokens / tokens per second"),
        ("device hours", _number(found["device_hours"]), "time x devices"),
        ("cost, USD", _number(found["cost"]), f"assumed: {hardware.price_per_hour:.2f} USD a device hour"),
        *_of_sweep(plan),
        ("a checkpoint, GB", _gb(found["checkpoint_bytes"]), f"counted: weights and two moments of {per}"),
        ("final weights, GB", _gb(found["final_bytes"]), f"counted: {per}"),
        ("disk while training, GB", _gb(found["disk_bytes"]),
         "counted: two checkpoints stay while the next is written"),
    ]  # fmt: skip
    for row in rows:
        grid.add_row(*row)
    return grid


def _of_sweep(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the rows of a sweep of such runs, if it is one."""
    if plan.runs == 1:
        return []
    found = plan.metrics
    rounds = math.ceil(plan.runs / plan.at_once)
    basis = f"{rounds} one after another, {plan.at_once} at once; assumed: each at the rate above"
    return [
        (f"time of {plan.runs:,} runs", duration(found["sweep_days"] * DAY), basis),
        ("  their cost, USD", _number(found["sweep_cost"]), "runs x cost"),
    ]


def _of_validations(recipe: Recipe, found: dict[str, float]) -> list[tuple[str, str, str]]:
    """Return the rows of what a run computes beside its training."""
    also = "1, 2, 4, 8 ... and " if recipe.val_at == "log" else ""
    rows = [
        ("validations", f"{recipe.validations:,}",
         f"of {recipe.tokens_of_validation:,} tokens: at 0, {also}every {recipe.val_every:,} steps, and the last"),
        ("validation tokens", f"{recipe.validated_tokens:,}",
         f"these, and {recipe.final_validation_tokens:,} at the end: the whole split"),
        ("  of the time", f"{found['validation_share']:.1%}", "assumed: forward, a third of training's FLOPs"),
    ]  # fmt: skip
    if recipe.pes_measurements:
        rows += [
            ("PES tokens", f"{found['pes_tokens']:,}",
             f"{recipe.pes_measurements:,} x {recipe.tokens_of_pes:,}, on each device, through all experts"),
            ("  of the time", f"{found['pes_share']:.1%}", "assumed: as its FLOPs"),
        ]  # fmt: skip
    return rows


def _of_memory(plan: Plan) -> Table:
    recipe = plan.recipe
    title = f"memory of a device, GB: {recipe.micro_batch} x {recipe.seq_len} tokens at a time in {recipe.precision}"
    if recipe.shape.num_experts:
        title += f", experts={plan.backend}"
    grid = new_grid(title, "", *plan.memory)
    parts = {
        "weights": "weights", "gradients": "gradients", "AdamW's two moments": "moments",
        "activations": "activations", "working memory of a layer": "working", "to train together": "sharing",
    }  # fmt: skip
    if plan.gpus == 1:
        del parts["to train together"]
    ways = plan.memory.values()
    for name, part in parts.items():
        grid.add_row(name, *(_gb(memory[part]) for memory in ways))
    grid.add_section()
    grid.add_row("most at once", *(_gb(memory["peak"]) for memory in ways))
    limit = plan.memory_share * plan.hardware.memory_bytes
    grid.add_row(f"fits into {_gb(limit)}", *("yes" if memory["fits"] else "no" for memory in ways))
    grid.add_row("largest micro-batch that fits", *(str(memory["largest_micro_batch"] or "none") for memory in ways))
    return grid


def _shared(recipe: Recipe, gpus: int, micro_batch: int | None) -> Recipe:
    """Return the recipe with a micro-batch that divides what each device has of the global batch.

    The user's own micro-batch has to divide it: else it is a `UserError`.
    """
    whole = recipe.global_batch
    if whole % gpus:
        raise UserError(
            f"gpus={gpus} cannot share the {whole} sequences of a step equally: it may be {_listed(divisors(whole))}, "
            "or set analysis.plan.global_batch"
        )
    sequences = whole // gpus
    sizes = divisors(sequences)
    if micro_batch is None:
        return replace(recipe, micro_batch=max(size for size in sizes if size <= recipe.micro_batch))
    if micro_batch not in sizes:
        raise UserError(
            f"analysis.plan.micro_batch={micro_batch} must divide the {sequences} sequences of a device: "
            f"it may be {_listed(sizes)}"
        )
    return recipe


def _automatic_backend(recipe: Recipe, hardware: Hardware) -> str:
    """Return the backend that experts=auto takes there: `fused` for bf16 on CUDA, if it has blocks for the widths."""
    if recipe.shape.bias:
        return "reference"
    in_bf16 = hardware.accelerator == "cuda" and recipe.precision != "32-true"
    return "fused" if in_bf16 and config_for(recipe.shape.d_model, recipe.shape.d_expert, math.inf) else "torch"


def _rate(recipe: Recipe, hardware: Hardware, gpus: int, backend: str, given: float | None, utilisation: float) -> Rate:
    """Return the rate that is given, or else measured, or else assumed."""
    if given is not None:
        return Rate(given, "given: analysis.plan.tokens_per_second", measured=True)
    measured = measured_rate(recipe, recipe.micro_batch, backend, hardware, gpus)
    flops = parameters(recipe.shape).training_flops(recipe.seq_len, recipe.tokens)
    return measured or assumed_rate(flops, recipe.tokens, hardware.peak(recipe.precision), gpus, utilisation)


def _planned(
    recipe: Recipe,
    hardware: Hardware,
    gpus: int,
    sweep: tuple[int, int],
    backend: str,
    rate: Rate,
    memory_share: float,
) -> Plan:
    """Return the plan of a run whose devices can share the batch; `sweep`: its runs, and how many at once."""
    counted = parameters(recipe.shape)
    flops = counted.training_flops(recipe.seq_len, recipe.tokens)
    other = _other_work(recipe, counted, gpus)
    work = recipe.tokens + sum(other.values())
    days = work / rate.tokens_per_second / DAY
    cost = 24 * days * gpus * hardware.price_per_hour
    runs, at_once = sweep
    step = Step(recipe.micro_batch, recipe.seq_len, False, recipe.precision, backend, hardware.accelerator)
    final_bytes = step.stored * counted.total
    metrics = {
        "parameters": counted.total,
        "active": counted.active,
        "tokens": recipe.tokens,
        "training_flops": flops,
        "validations": recipe.validations,
        "validation_tokens": recipe.validated_tokens,
        "pes_tokens": recipe.pes_measurements * recipe.tokens_of_pes,
        **{f"{name}_share": share / work for name, share in other.items()},
        "tokens_per_second": rate.tokens_per_second,
        "days": days,
        "device_hours": 24 * days * gpus,
        "cost": cost,
        "sweep_days": days * math.ceil(runs / at_once),
        "sweep_cost": cost * runs,
        "checkpoint_bytes": 3 * final_bytes,  # with two moments; what else a checkpoint has are kilobytes
        "final_bytes": final_bytes,
        "disk_bytes": ON_DISK * 3 * final_bytes,
    }
    limit = memory_share * hardware.memory_bytes
    memory = {strategy: _memory(strategy, recipe, step, gpus, limit) for strategy in strategies(gpus)}
    return Plan(recipe, hardware, gpus, runs, at_once, rate, memory_share, metrics, memory, backend)


def _other_work(recipe: Recipe, counted: Parameters, gpus: int) -> dict[str, float]:
    """Return the work of validations and of PES, in training tokens that have the same FLOPs.

    Validations are shared among the devices. PES is not: each measures all of it, through every expert beside the
    chosen ones, but not through the head, whose weights are as many as the embedding's.
    """
    forward = counted.forward_flops(recipe.seq_len)
    through_all = forward + 2 * (counted.ffn_routed - counted.embedding)
    pes_tokens = gpus * recipe.pes_measurements * recipe.tokens_of_pes
    return {"validation": recipe.validated_tokens / 3, "pes": pes_tokens * through_all / (3 * forward)}


def _memory(strategy: str, recipe: Recipe, step: Step, gpus: int, limit: float) -> dict[str, Any]:
    """Return the bytes of a device by part, their `peak`, whether that `fits`, and `largest_micro_batch` that does."""
    sequences = recipe.global_batch // gpus

    def memory_of(size: int) -> DeviceMemory:
        of_size = replace(step, micro_batch=size, accumulates=size < sequences)
        return device_memory(strategy, recipe.shape, of_size, gpus)

    memory = memory_of(recipe.micro_batch)
    largest = largest_micro_batch(memory_of, sequences, limit)
    return asdict(memory) | {"peak": memory.peak, "fits": memory.peak <= limit, "largest_micro_batch": largest}


def _gb(size: float) -> str:
    return _number(size / 1e9)


def _number(value: float) -> str:
    """Return a number with two digits after the point, or a small one with three significant digits."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))

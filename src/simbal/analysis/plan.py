"""The analysis `plan`: estimated time, memory and price of training a model on given hardware. Nothing is trained.

Reference: arXiv 2506.14038 for the paper's runs. FLOPs are counted as in the analysis `flops`.
"""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from rich.table import Table

from simbal.analysis.flops import read_option, shape_of
from simbal.analysis.result import Result, numbers_table
from simbal.config.compose import validate
from simbal.config.options import options
from simbal.config.schema import Group, ModelConfig
from simbal.config.values import check_integer, divisors
from simbal.console import new_grid
from simbal.cost import DeviceMemory, Precision, Step, device_memory, moments, parameters
from simbal.errors import UserError
from simbal.model.transformer import TransformerShape
from simbal.runs.spec import RunSpec

DAY = 86_400  # seconds
UNITS = {"days": DAY, "hours": 3_600, "minutes": 60, "seconds": 1}
# trainer by (num_layers, d_model); all other models use trainer=default
TRAINERS = {(2, 128): "bench", (8, 768): "paper_m", (12, 1536): "paper_l"}
# tokens of the final validation, which uses the whole split. pysource: the windows in the first 2,048 tokens of each
# of 82 held-out documents; dclm: one shard
HELD_OUT = {"pysource": 131_328, "dclm": 80_000_000}
DEFINITION = {
    "tokens_per_second": "speed of all devices: given, or utilization * peak FLOP/s * devices / training FLOPs per "
    "token",
    "days": "(training tokens + validation_tokens / 3) / tokens_per_second, because a forward pass is a third of the "
    "training FLOPs; excludes PES, checkpoints and data preparation",
    "validation_tokens": "tokens of all validations; the final one uses the whole split",
    "peak_share": "tokens_per_second * training FLOPs per token / (peak FLOP/s * devices)",
    "device_hours": "24 * days * devices",
    "cost": "USD, device_hours * price_per_hour",
    "sweep_days": "days * ceil(runs / at_once), each run at tokens_per_second; excludes process startup",
    "sweep_cost": "USD, cost * runs",
    "checkpoint_bytes": "bytes of the weights and AdamW's two moments, in their stored precision",
    "final_bytes": "bytes of the weights",
    "memory": "bytes per device by purpose; activations: kept by autograd for one micro-batch; working: temporary "
    "memory of one layer or the head, whichever needs more; sharing: gradient buckets (ddp), or gathered weights and "
    "gradients (fsdp)",
}
Share = Annotated[float, Field(gt=0, le=1)]


class Hardware(Group):
    """A device. Each file of conf/hardware gives the source of its numbers."""

    device: str
    accelerator: Literal["cpu", "cuda"]
    bf16_flops: float | None = Field(gt=0)  # peak FLOP/s of dense products; None: no bf16
    fp32_flops: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    price_per_hour: float = Field(ge=0)  # USD, assumed


@dataclass(frozen=True)
class Recipe:
    """A training run without its hardware."""

    model: str  # a file of conf/model, or `a modified model`
    shape: TransformerShape
    trainer: str  # the file of conf/trainer that gives the defaults
    steps: int
    global_batch: int  # sequences
    micro_batch: int  # sequences
    precision: str
    seq_len: int
    validations: int  # before the first step, every `val_every` steps, after the last step, and early ones
    validation_tokens: int  # per validation except the final one
    final_validation_tokens: int

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return self.steps * self.global_batch * self.seq_len

    @property
    def validated_tokens(self) -> int:
        """Tokens of all validations."""
        return self.validations * self.validation_tokens + self.final_validation_tokens


def plan(
    model: Any,
    hardware: Any,
    gpus: int | None,
    runs: PositiveInt,
    at_once: PositiveInt,
    steps: PositiveInt | None,
    global_batch: PositiveInt | None,
    micro_batch: PositiveInt | None,
    precision: Precision | None,
    algorithm: Literal["adamw", "muon"],
    seq_len: PositiveInt | None,
    vocab_size: PositiveInt | None,
    val_every: PositiveInt | None,
    validation_tokens: PositiveInt | None,
    tokens_per_second: PositiveFloat | None,
    utilization: Share,
    memory_share: Share,
) -> Result:
    """Estimate the cost of a run or a sweep, and state which numbers are counted, given or assumed.

    Args:
        model: keys of conf/model.
        hardware: keys of conf/hardware.
        gpus: devices per run; None: one.
        runs: number of runs in the sweep.
        at_once: number of runs that train at the same time.
        steps: training steps. Here and in the next seven, None means the default of the model's trainer and data.
        global_batch: sequences per step, over all devices.
        micro_batch: sequences per device at a time.
        precision: training precision.
        algorithm: optimizer; with Muon, fsdp is not estimated, because it cannot train.
        seq_len: tokens per sequence.
        vocab_size: number of token ids.
        val_every: steps between validations.
        validation_tokens: tokens per validation, except the final one.
        tokens_per_second: measured speed of a run on these devices; None: estimate it from `utilization`.
        utilization: share of the peak FLOP/s.
        memory_share: share of a device's memory that a step may use.

    Raises:
        UserError: model or hardware is missing or invalid, or the devices cannot share the batch.
    """
    for key, keys in {"model": model, "hardware": hardware}.items():
        if keys is None:
            raise UserError(f"analysis=plan needs {key}=NAME; `evaluate.py --help {key}` lists the names")
    validate(ModelConfig, model, "model.")
    device = validate(Hardware, hardware, "hardware.")
    gpus = 1 if gpus is None else check_integer("gpus", gpus, 1)
    given = {
        "steps": steps, "global_batch": global_batch, "micro_batch": micro_batch, "precision": precision,
        "seq_len": seq_len, "vocab_size": vocab_size, "val_every": val_every, "validation_tokens": validation_tokens,
    }  # fmt: skip
    recipe = find_recipe(model, device, gpus, {key: value for key, value in given.items() if value is not None})
    peak = device.fp32_flops if recipe.precision == "32-true" else device.bf16_flops
    if peak is None:
        raise UserError(f"{device.device} has no bf16: set analysis.plan.precision=32-true (got {recipe.precision})")
    counted = parameters(recipe.shape)
    training_flops = counted.training_flops(recipe.seq_len, recipe.tokens)
    rate = tokens_per_second or gpus * peak * utilization * recipe.tokens / training_flops
    validated = recipe.validated_tokens
    days = (recipe.tokens + validated / 3) / rate / DAY
    cost = 24 * days * gpus * device.price_per_hour
    muon = algorithm == "muon"
    accumulates = recipe.micro_batch < recipe.global_batch // gpus
    step = Step(recipe.micro_batch, recipe.seq_len, accumulates, recipe.precision, device.accelerator, muon)
    metrics = {
        "parameters": counted.total,
        "active": counted.active,
        "forward_flops": counted.forward_flops(recipe.seq_len),
        "tokens": recipe.tokens,
        "training_flops": training_flops,
        "validation_tokens": validated,
        "tokens_per_second": rate,
        "peak_share": training_flops / recipe.tokens * rate / (gpus * peak),
        "days": days,
        "device_hours": 24 * days * gpus,
        "cost": cost,
        "runs": runs,
        "sweep_days": days * math.ceil(runs / at_once),
        "sweep_cost": cost * runs,
        "final_bytes": step.stored * counted.total,
        "checkpoint_bytes": step.stored * (counted.total + moments(recipe.shape, muon)),
    }
    strategies = ("one device",) if gpus == 1 else ("ddp",) if muon else ("ddp", "fsdp")
    memory = {strategy: device_memory(recipe.shape, step, strategy, gpus) for strategy in strategies}
    limit = memory_share * device.memory_bytes
    basis, notes = "given", []
    if not tokens_per_second:
        basis = f"assumed: {utilization:.0%} of {gpus} x {peak / 1e12:,.4g} TFLOP/s"
        notes = [
            "The utilization is assumed. Set analysis.plan.tokens_per_second to the speed measured in a short run."
        ]
    notes.append(
        "The time excludes PES, checkpoints, data preparation and process startup. Override a device's numbers with "
        "keys such as hardware.price_per_hour=2."
    )
    record = {
        "definition": DEFINITION,
        "recipe": asdict(recipe),
        "hardware": device.model_dump(),
        "devices": gpus,
        "metrics": metrics,
        "memory": {name: asdict(use) | {"peak": use.peak, "fits": use.peak <= limit} for name, use in memory.items()},
    }
    tables = [_run_table(recipe, device, gpus, metrics, basis), _memory_table(recipe, memory, limit)]
    return Result(tables, notes, record)


def find_recipe(model: dict[str, Any], device: Hardware, gpus: int, given: dict[str, Any]) -> Recipe:
    """Return the recipe of a model on `gpus` devices.

    Values that are not `given` come from the paper's trainer and data for its models, and from train.py's defaults for
    all others. The default micro-batch is reduced to a divisor of a device's sequences.

    Args:
        model: keys of conf/model.
        device: the hardware.
        gpus: number of devices.
        given: values that the user sets, by key of conf/trainer and conf/data.

    Raises:
        UserError: the devices cannot share the batch.
    """
    trainer = TRAINERS.get((model["num_layers"], model["d_model"]), "default")
    source = "dclm" if trainer.startswith("paper") else "pysource"
    keys = read_option("data", source) | read_option("trainer", trainer)
    if keys["precision"] == "auto":
        keys["precision"] = "32-true" if device.accelerator == "cpu" else "bf16-mixed"
    largest = keys["micro_batch"]
    keys = keys | {"steps": keys["max_steps"]} | given
    batch, steps, val_every = keys["global_batch"], keys["steps"], keys["val_every"]
    if batch % gpus:
        allowed = ", ".join(map(str, divisors(batch)))
        raise UserError(f"gpus={gpus} must divide the {batch} sequences of a step: {allowed}")
    sizes = divisors(batch // gpus)
    micro_batch = given.get("micro_batch") or max(size for size in sizes if size <= largest)
    if micro_batch not in sizes:
        raise UserError(
            f"analysis.plan.micro_batch={micro_batch} must divide the {batch // gpus} sequences of a device: "
            f"{', '.join(map(str, sizes))}"
        )
    return Recipe(
        model=next((name for name in options("model") if read_option("model", name) == model), "a modified model"),
        shape=shape_of(model, keys["vocab_size"]),
        trainer=trainer,
        steps=steps,
        global_batch=batch,
        micro_batch=micro_batch,
        precision=keys["precision"],
        seq_len=keys["seq_len"],
        validations=_count_validations(steps, val_every, keys["val_at"]),
        validation_tokens=min(keys["validation_tokens"], HELD_OUT[source]),
        final_validation_tokens=HELD_OUT[source],
    )


def _count_validations(steps: int, val_every: int, val_at: str) -> int:
    early = (min(val_every, steps) - 1).bit_length() if val_at == "log" else 0  # after 1, 2, 4, 8 ... steps
    return 1 + early + math.ceil(steps / val_every)


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a run in seconds, the processor that is assumed, and the bytes that the run writes."""

    seconds: float | None  # None: conf/hardware lacks the processor
    processor: str
    final_bytes: int  # weights of the finished run
    checkpoint_bytes: int  # checkpoints of the running run


def estimate(spec: RunSpec) -> Estimate:
    """Estimate a run on this machine from the peak FLOP/s in conf/hardware and the utilization in conf/analysis."""
    from simbal.training import build  # imports Lightning, which the analysis does not need
    from simbal.training.checkpoint import KEPT

    data, trainer, has_gpu = spec.config.data, spec.config.trainer, torch.cuda.is_available()
    on_cpu = trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not has_gpu)
    name = "cpu" if on_cpu else torch.cuda.get_device_name().lower() if has_gpu else ""
    devices = [validate(Hardware, read_option("hardware", each)) for each in options("hardware") if each in name]
    precision = ("32-true" if on_cpu else "bf16-mixed") if trainer.precision == "auto" else trainer.precision
    shape, stored = build.transformer_shape(spec, end_of_text=0), 2 if precision == "bf16-true" else 4
    counted, num_moments = parameters(shape), moments(shape, spec.config.optim.algorithm == "muon")
    weights, checkpoints = stored * counted.total, KEPT * stored * (counted.total + num_moments)
    kept = weights * (1 + (trainer.max_steps // trainer.keep_every if trainer.keep_every else 0))
    peak = (devices[0].fp32_flops if precision == "32-true" else devices[0].bf16_flops) if devices else None
    if peak is None:
        return Estimate(None, name, kept, checkpoints)
    held_out = HELD_OUT.get(data.source, data.validation_tokens or 0)
    validations = _count_validations(trainer.max_steps, trainer.val_every, trainer.val_at)
    validated = validations * min(data.validation_tokens or held_out, held_out) + held_out
    tokens = trainer.max_steps * trainer.global_batch * data.seq_len
    rate = trainer.devices * peak * read_option("analysis", "plan")["plan.utilization"]
    seconds = counted.training_flops(data.seq_len, 1) * (tokens + validated / 3) / rate
    return Estimate(seconds, devices[0].device, kept, checkpoints)


def _run_table(recipe: Recipe, device: Hardware, gpus: int, numbers: dict[str, float], basis: str) -> Table:
    """Return the table of a run. `basis` is the source of its tokens per second."""
    accumulated = recipe.global_batch // gpus // recipe.micro_batch
    batch = f"{gpus} x {accumulated} x {recipe.micro_batch} x {recipe.seq_len}"
    rows = [
        ("parameters", f"{numbers['parameters']:,}", f"counted; {numbers['active']:,} active"),
        ("forward FLOPs per token", f"{numbers['forward_flops']:,}", "counted, as in analysis=flops"),
        ("training tokens", f"{recipe.tokens:,}", f"{recipe.steps:,} steps; defaults of trainer={recipe.trainer}"),
        ("tokens per step", f"{batch} = {recipe.global_batch * recipe.seq_len:,}",
         "devices x accumulated micro-batches x sequences x length"),
        ("training FLOPs", f"{numbers['training_flops']:.4e}", "counted: 3 x forward x tokens"),
        ("tokens per second", f"{numbers['tokens_per_second']:,.0f}", basis),
        ("share of the peak", f"{numbers['peak_share']:.1%}", "from tokens per second"),
        ("validation tokens", f"{numbers['validation_tokens']:,}",
         f"{recipe.validations:,} x {recipe.validation_tokens:,}, and {recipe.final_validation_tokens:,} at the end"),
        ("time", format_duration(numbers["days"] * DAY), "training and validation (forward: a third of training)"),
        ("device hours", _format(numbers["device_hours"]), "time x devices"),
        ("cost, USD", _format(numbers["cost"]), f"assumed: {device.price_per_hour:.2f} USD per device hour"),
        ("a checkpoint, GB", _format(numbers["checkpoint_bytes"] / 1e9), "counted: weights and AdamW's two moments"),
    ]  # fmt: skip
    if (runs := numbers["runs"]) > 1:
        rows += [
            (f"time of {runs:,} runs", format_duration(numbers["sweep_days"] * DAY), "all runs at the same speed"),
            (f"cost of {runs:,} runs, USD", _format(numbers["sweep_cost"]), "runs x cost"),
        ]
    grid = new_grid(f"training {recipe.model} on {gpus} x {device.device}", "", "value")
    grid.add_column("source")
    for row in rows:
        grid.add_row(*row)
    return grid


def _memory_table(recipe: Recipe, memory: dict[str, DeviceMemory], limit: float) -> Table:
    title = f"memory of a device, GB: {recipe.micro_batch} x {recipe.seq_len} tokens at a time in {recipe.precision}"
    parts = {
        "weights": "weights", "gradients": "gradients", "AdamW's two moments": "moments",
        "activations": "activations", "working memory of a layer": "working", "buffers of ddp or fsdp": "sharing",
        "peak": "peak",
    }  # fmt: skip
    uses = memory.values()
    rows = [[label, *(_format(getattr(use, part) / 1e9) for use in uses)] for label, part in parts.items()]
    rows.append([f"fits into {_format(limit / 1e9)}", *("yes" if use.peak <= limit else "no" for use in uses)])
    return numbers_table(title, ["", *memory], rows[:-2], rows[-2:])


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives at least two, such as `3.0 hours`."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "seconds")
    return f"{seconds / UNITS[unit]:,.1f} {unit}"


def _format(value: float) -> str:
    """Return a number with two decimals, or three significant digits below 1."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"

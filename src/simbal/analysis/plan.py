"""The analysis `plan`: the time, memory and price of training a model on named hardware; nothing is made.

Reference: arXiv 2506.14038 for the paper's runs; FLOPs are counted as in the analysis `flops`.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from simbal.analysis.flops import read_option, shape_of
from simbal.analysis.result import Result
from simbal.config.compose import typed
from simbal.config.options import options
from simbal.config.schema import Group, ModelConfig
from simbal.config.values import divisors, whole_number
from simbal.console import new_grid
from simbal.cost.memory import DeviceMemory, Precision, Step, device_memory
from simbal.cost.parameters import parameters
from simbal.errors import UserError
from simbal.model.transformer import TransformerShape

DAY = 86_400  # seconds
UNITS = {"days": DAY, "hours": 3_600, "minutes": 60, "seconds": 1}
# trainers of the models with a recipe of their own, by layers and width: with other experts too
TRAINERS = {(2, 64): "bench", (8, 768): "paper_m", (12, 1536): "paper_l"}
# tokens of the whole validation split, on which a run ends: the windows in the first 2,048 tokens of each of pysource's
# 82 held-out documents; one shard of DCLM
HELD_OUT = {"pysource": 131_328, "dclm": 80_000_000}
DEFINITION = {
    "tokens_per_second": "of all devices: given, or utilisation * peak FLOP/s * devices / training FLOPs per token",
    "days": "(training tokens + validation_tokens / 3) / tokens_per_second, as a forward pass is a third of training's "
    "FLOPs; without PES, checkpoints and the preparation of data",
    "validation_tokens": "of all validations, of which the final one is of the whole split",
    "peak_share": "tokens_per_second * training FLOPs per token / (peak FLOP/s * devices)",
    "device_hours": "24 * days * devices",
    "cost": "USD, device_hours * price_per_hour",
    "sweep_days": "days * ceil(runs / at_once), each run with tokens_per_second; without the start of their processes",
    "sweep_cost": "USD, cost * runs",
    "checkpoint_bytes": "weights and AdamW's two moments, in the precision they are stored in",
    "final_bytes": "weights",
    "memory": "bytes of a device by part; activations: what autograd keeps of one micro-batch; working: the most that "
    "one layer or the head needs in addition; sharing: buckets of gradients (ddp), or the gathered weights and "
    "gradients of other devices (fsdp)",
}


class Hardware(Group):
    """A device; each file of conf/hardware says where its numbers are from."""

    device: str
    accelerator: Literal["cpu", "cuda"]
    bf16_flops: float | None = Field(gt=0)  # peak FLOP/s of dense products; None: it has no bf16
    fp32_flops: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    price_per_hour: float = Field(ge=0)  # USD, an assumption


@dataclass(frozen=True)
class Recipe:
    """A training run without its hardware."""

    model: str  # a file of conf/model, or `a changed model`
    shape: TransformerShape
    trainer: str  # a file of conf/trainer, which has what the user has not set
    steps: int
    global_batch: int  # sequences
    micro_batch: int  # sequences
    precision: str
    seq_len: int
    validations: int  # before the first step, after every `val_every`, after the last, and early ones
    validation_tokens: int  # of each of them
    final_validation_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole training."""
        return self.steps * self.global_batch * self.seq_len


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
    validation_tokens: int | None,
    tokens_per_second: float | None,
    utilisation: float,
    memory_share: float,
) -> Result:
    """Say what a run or a sweep takes, and of each number whether it is counted, given or assumed.

    Args:
        model: keys of conf/model, as `model=NAME` chooses them.
        hardware: keys of conf/hardware, as `hardware=NAME` chooses them.
        gpus: how many devices; None: one.
        runs: of a sweep, each like this one.
        at_once: of these runs, each on as many devices.
        steps: of training; this and the next seven: None means as the model's trainer and data have it.
        global_batch: sequences of a step, over all devices.
        micro_batch: sequences at a time on each device.
        precision: of the training.
        seq_len: tokens.
        vocab_size: token ids.
        val_every: steps between validations.
        validation_tokens: of a validation along the way.
        tokens_per_second: of a run, as it was seen on these devices; None: by `utilisation`.
        utilisation: share of the peak FLOP/s, above 0 and at most 1.
        memory_share: of a device's memory that a step may fill, above 0 and at most 1.

    Raises:
        UserError: no model or hardware is given, a key is out of its range, or the devices cannot share the batch.
    """
    for key, keys in {"model": model, "hardware": hardware}.items():
        if keys is None:
            raise UserError(f"analysis=plan needs {key}=NAME: there is {', '.join(options(key))}")
    device = typed(Hardware, hardware, "hardware.")
    gpus = 1 if gpus is None else whole_number("gpus", gpus, 1)
    numbers = {
        "runs": runs, "at_once": at_once, "steps": steps, "global_batch": global_batch, "micro_batch": micro_batch,
        "seq_len": seq_len, "vocab_size": vocab_size, "val_every": val_every, "validation_tokens": validation_tokens,
    }  # fmt: skip
    given = {key: whole_number(f"analysis.plan.{key}", n, 1) for key, n in numbers.items() if n is not None}
    for key, share in {"utilisation": utilisation, "memory_share": memory_share}.items():
        if not 0 < share <= 1:
            raise UserError(f"analysis.plan.{key}={share} must be above 0 and at most 1")
    if tokens_per_second is not None and not tokens_per_second > 0:
        raise UserError(f"analysis.plan.tokens_per_second={tokens_per_second} must be above 0")

    recipe = recipe_of(model, device, gpus, given | ({"precision": precision} if precision else {}))
    peak = device.fp32_flops if recipe.precision == "32-true" else device.bf16_flops
    if peak is None:
        raise UserError(f"analysis.plan.precision={recipe.precision}: {device.device} has no bf16: use 32-true")
    counted = parameters(recipe.shape)
    training_flops = counted.training_flops(recipe.seq_len, recipe.tokens)
    rate = tokens_per_second or gpus * peak * utilisation * recipe.tokens / training_flops
    validated = recipe.validations * recipe.validation_tokens + recipe.final_validation_tokens
    days = (recipe.tokens + validated / 3) / rate / DAY
    cost = 24 * days * gpus * device.price_per_hour
    sequences = recipe.global_batch // gpus
    step = Step(
        recipe.micro_batch, recipe.seq_len, recipe.micro_batch < sequences, recipe.precision, device.accelerator
    )
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
        "checkpoint_bytes": 3 * step.stored * counted.total,
    }
    ways = ("ddp", "fsdp") if gpus > 1 else ("one device",)
    memory = {way: device_memory(recipe.shape, step, way, gpus) for way in ways}
    limit = memory_share * device.memory_bytes

    notes = [
        "Not in the time: PES, checkpoints, data, the start of processes. Set device memory and price as in "
        "hardware.price_per_hour=2."
    ]
    if not tokens_per_second:
        notes.insert(0, "Give analysis.plan.tokens_per_second of a short run there, or else utilisation is assumed.")
    record = {
        "definition": DEFINITION,
        "recipe": asdict(recipe),
        "hardware": device.model_dump(),
        "devices": gpus,
        "metrics": metrics,
        "memory": {way: asdict(of) | {"peak": of.peak, "fits": of.peak <= limit} for way, of in memory.items()},
    }
    basis = "given" if tokens_per_second else f"assumed: {utilisation:.0%} of {gpus} x {peak / 1e12:,.4g} TFLOP/s"
    return Result([_of_run(recipe, device, gpus, metrics, basis), _of_memory(recipe, memory, limit)], notes, record)


def recipe_of(model: dict[str, Any], device: Hardware, gpus: int, given: dict[str, Any]) -> Recipe:
    """Return the recipe of a model with these keys of conf/model, on `gpus` devices.

    What is not `given` is as in the trainer and data of the paper for its models, as train.py has it for others. The
    micro-batch is then the largest divisor of a device's sequences that is at most as large as there.

    Raises:
        UserError: a key has no sensible value, or the devices cannot share the batch.
    """
    typed(ModelConfig, model, "model.")
    trainer = TRAINERS.get((model["num_layers"], model["d_model"]), "default")
    source = "dclm" if trainer.startswith("paper") else "pysource"
    usual = read_option("data", source) | read_option("trainer", trainer)
    if usual["precision"] == "auto":
        usual["precision"] = "32-true" if device.accelerator == "cpu" else "bf16-mixed"
    keys = usual | {"steps": usual["max_steps"]} | given
    whole, steps, val_every = keys["global_batch"], keys["steps"], keys["val_every"]
    if whole % gpus:
        allowed = ", ".join(map(str, divisors(whole)))
        raise UserError(
            f"gpus={gpus} cannot share the {whole} sequences of a step equally: it may be {allowed}, "
            "or set analysis.plan.global_batch"
        )
    sizes = divisors(whole // gpus)
    micro_batch = given.get("micro_batch") or max(size for size in sizes if size <= keys["micro_batch"])
    if micro_batch not in sizes:
        raise UserError(
            f"analysis.plan.micro_batch={micro_batch} must divide the {whole // gpus} sequences of a device: "
            f"it may be {', '.join(map(str, sizes))}"
        )
    early = (min(val_every, steps) - 1).bit_length() if keys["val_at"] == "log" else 0  # after 1, 2, 4, 8 ... steps
    return Recipe(
        model=next((name for name in options("model") if read_option("model", name) == model), "a changed model"),
        shape=shape_of(model, keys["vocab_size"]),
        trainer=trainer,
        steps=steps,
        global_batch=whole,
        micro_batch=micro_batch,
        precision=keys["precision"],
        seq_len=keys["seq_len"],
        validations=1 + early + math.ceil(steps / val_every),
        validation_tokens=min(keys["validation_tokens"], HELD_OUT[source]),
        final_validation_tokens=HELD_OUT[source],
    )


def _of_run(recipe: Recipe, device: Hardware, gpus: int, found: dict[str, float], basis: str) -> Table:
    """Return the table of a run; `basis` says where its tokens per second are from."""
    grid = new_grid(f"training {recipe.model} on {gpus} x {device.device}", "", "value")
    grid.add_column("how it is known")
    accumulated = recipe.global_batch // gpus // recipe.micro_batch
    batch = f"{gpus} x {accumulated} x {recipe.micro_batch} x {recipe.seq_len}"
    rows = [
        ("parameters", f"{found['parameters']:,}", f"counted; {found['active']:,} of them active"),
        ("forward FLOPs per token", f"{found['forward_flops']:,}", "counted, as in analysis=flops"),
        ("training tokens", f"{recipe.tokens:,}", f"{recipe.steps:,} steps; trainer={recipe.trainer} where not set"),
        ("tokens of a step", f"{batch} = {recipe.global_batch * recipe.seq_len:,}",
         "devices x accumulated micro-batches x sequences x length"),
        ("training FLOPs", f"{found['training_flops']:.4e}", "counted: 3 x forward x tokens"),
        ("tokens per second", f"{found['tokens_per_second']:,.0f}", basis),
        ("share of the peak", f"{found['peak_share']:.1%}", "from the line above"),
        ("validation tokens", f"{found['validation_tokens']:,}",
         f"{recipe.validations:,} x {recipe.validation_tokens:,}, and {recipe.final_validation_tokens:,} at the end"),
        ("time", duration(found["days"] * DAY), "of training and validation; forward takes a third of training"),
        ("device hours", _number(found["device_hours"]), "time x devices"),
        ("cost, USD", _number(found["cost"]), f"assumed: {device.price_per_hour:.2f} USD a device hour"),
        ("a checkpoint, GB", _number(found["checkpoint_bytes"] / 1e9), "counted: weights and AdamW's two moments"),
    ]  # fmt: skip
    if found["runs"] > 1:
        rows += [
            (f"time of {found['runs']:,} runs", duration(found["sweep_days"] * DAY), "each run at the same rate"),
            (f"cost of {found['runs']:,} runs, USD", _number(found["sweep_cost"]), "runs x cost"),
        ]
    for row in rows:
        grid.add_row(*row)
    return grid


def _of_memory(recipe: Recipe, memory: dict[str, DeviceMemory], limit: float) -> Table:
    title = f"memory of a device, GB: {recipe.micro_batch} x {recipe.seq_len} tokens at a time in {recipe.precision}"
    grid = new_grid(title, "", *memory)
    parts = {
        "weights": "weights", "gradients": "gradients", "AdamW's two moments": "moments",
        "activations": "activations", "working memory of a layer": "working", "to train together": "sharing",
    }  # fmt: skip
    for name, part in parts.items():
        grid.add_row(name, *(_number(getattr(of, part) / 1e9) for of in memory.values()))
    grid.add_section()
    grid.add_row("most at once", *(_number(of.peak / 1e9) for of in memory.values()))
    grid.add_row(f"fits into {_number(limit / 1e9)}", *("yes" if of.peak <= limit else "no" for of in memory.values()))
    return grid


def duration(seconds: float) -> str:
    """Return a time as text, in the largest unit that gives at least 2."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "seconds")
    return f"{seconds / UNITS[unit]:,.1f} {unit}"


def _number(value: float) -> str:
    """Return a number with two digits after the point, or a small one with three significant digits."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"

"""What the analysis `plan` prints: a line for each number with how it is known, and the memory of a device."""

from dataclasses import dataclass

from rich.table import Table

from simbal.analysis.flops_tables import duration
from simbal.analysis.hardware import Hardware
from simbal.analysis.rates import Rate
from simbal.analysis.recipe import Recipe
from simbal.analysis.training_cost import Parameters
from simbal.console import new_grid
from simbal.model.device_memory import DeviceMemory

DAY = 86_400  # seconds
ON_DISK = 3  # checkpoints: two stay while the next is written


@dataclass(frozen=True)
class Sharing:
    """One way in which devices train a model together."""

    memory: DeviceMemory
    fits: bool
    largest_micro_batch: int | None  # that fits; None: none does


@dataclass(frozen=True)
class Plan:
    """A run on its hardware."""

    recipe: Recipe
    hardware: Hardware
    gpus: int
    counted: Parameters
    training_flops: int
    rate: Rate
    peak_flops: float  # of a device, in the run's precision
    stored: int  # bytes of a parameter, and of each of its moments
    memory_share: float
    sharing: dict[str, Sharing]

    @property
    def days(self) -> float:
        """Of training alone."""
        return self.recipe.tokens / self.rate.tokens_per_second / DAY

    @property
    def device_hours(self) -> float:
        """Of all devices."""
        return 24 * self.days * self.gpus

    @property
    def cost(self) -> float:
        """USD."""
        return self.device_hours * self.hardware.price_per_hour

    @property
    def final_bytes(self) -> int:
        """Of the weights alone."""
        return self.stored * self.counted.total

    @property
    def checkpoint_bytes(self) -> int:
        """Of weights and two moments; what else a checkpoint has are kilobytes."""
        return 3 * self.final_bytes

    @property
    def disk_bytes(self) -> int:
        """While training."""
        return ON_DISK * self.checkpoint_bytes


def tables(plan: Plan) -> list[Table]:
    """The run, then the memory of a device."""
    return [_of_run(plan), _of_memory(plan)]


def _of_run(plan: Plan) -> Table:
    recipe, hardware = plan.recipe, plan.hardware
    grid = new_grid(f"training {recipe.model or 'a changed model'} on {plan.gpus} x {hardware.device}")
    for heading in ("", "value", "how it is known"):
        grid.add_column(heading, justify="right" if heading == "value" else "left")
    accumulated = recipe.global_batch // plan.gpus // recipe.micro_batch
    batch = f"{plan.gpus} x {accumulated} x {recipe.micro_batch} x {recipe.seq_len}"
    used = plan.training_flops / recipe.tokens * plan.rate.tokens_per_second / (plan.gpus * plan.peak_flops)
    per = f"{plan.stored} bytes a parameter ({recipe.precision})"
    rows = [
        ("parameters", f"{plan.counted.total:,}", f"counted; {plan.counted.active:,} of them active"),
        ("training tokens", f"{recipe.tokens:,}", f"{recipe.steps:,} steps: {recipe.source}"),
        ("tokens of a step", f"{batch} = {recipe.global_batch * recipe.seq_len:,}",
         "devices x accumulated micro-batches x sequences x length"),
        ("training FLOPs", f"{plan.training_flops:.4e}", "counted, as in analysis=flops"),
        ("tokens per second", f"{plan.rate.tokens_per_second:,.0f}", plan.rate.basis),
        ("share of the peak", f"{used:.1%}", "from the line above" if plan.rate.measured else "assumed"),
        ("time", duration(plan.days * DAY), "tokens / tokens per second"),
        ("device hours", _number(plan.device_hours), "time x devices"),
        ("cost, USD", _number(plan.cost), f"assumed: {hardware.price_per_hour:.2f} USD a device hour"),
        ("a checkpoint, GB", _gb(plan.checkpoint_bytes), f"counted: weights and two moments of {per}"),
        ("final weights, GB", _gb(plan.final_bytes), f"counted: {per}"),
        ("disk while training, GB", _gb(plan.disk_bytes), "counted: two checkpoints stay while the next is written"),
    ]  # fmt: skip
    for row in rows:
        grid.add_row(*row)
    return grid


def _of_memory(plan: Plan) -> Table:
    recipe = plan.recipe
    title = f"memory of a device, GB: {recipe.micro_batch} x {recipe.seq_len} tokens at a time in {recipe.precision}"
    grid = new_grid(title)
    grid.add_column("")
    for strategy in plan.sharing:
        grid.add_column(strategy, justify="right")
    ways = [*plan.sharing.values()]
    parts = {"weights": "weights", "gradients": "gradients", "AdamW's two moments": "moments"}
    parts |= {"activations": "activations", "working memory of a layer": "working"}
    for name, part in parts.items():
        grid.add_row(name, *(_gb(getattr(way.memory.step, part)) for way in ways))
    if plan.gpus > 1:
        grid.add_row("to train together", *(_gb(way.memory.sharing) for way in ways))
    grid.add_section()
    grid.add_row("most at once", *(_gb(way.memory.peak) for way in ways))
    limit = plan.memory_share * plan.hardware.memory_bytes
    fits = f"fits into {_gb(limit)}"
    grid.add_row(fits, *("yes" if way.fits else "no" for way in ways))
    grid.add_row("largest micro-batch that fits", *(str(way.largest_micro_batch or "none") for way in ways))
    return grid


def notes(plan: Plan) -> list[str]:
    """What was not measured, and what is left out."""
    said = [
        f"Memory is counted, not measured on a GPU; {plan.memory_share:.0%} of {_gb(plan.hardware.memory_bytes)} GB "
        "may be filled, an assumption (analysis.plan.memory_share).",
        "Not in the time: validations, checkpoints, data. Device memory and price: conf/hardware, "
        "as in hardware.price_per_hour=2.",
    ]
    if not plan.rate.measured:
        said.insert(
            0, "The rate is no measurement: time, device hours and cost are as good as its assumption, which "
            "includes communication between devices (analysis.plan.utilisation)."
        )  # fmt: skip
    for strategy, way in plan.sharing.items():
        if not way.fits:
            fits = way.largest_micro_batch
            remedy = f"analysis.plan.micro_batch={fits} would" if fits else "nor would any micro-batch"
            said.append(f"{strategy}: a step does not fit; {remedy}.")
    return said


def _gb(size: float) -> str:
    return _number(size / 1e9)


def _number(value: float) -> str:
    """Two digits after the point, or three that count."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"

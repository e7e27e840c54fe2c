"""The analysis `ep_load`: how unevenly the experts' work falls on the devices of expert parallelism.

What a run records of its load is of whole validations, and of steps the mean MaxVio alone. A device waits in each
step, so the load is counted here, in steps made of validation sequences. The number is ours; with a device for each
expert it is MaxVio + 1 (arXiv 2408.15664).
Shapes: B sequences, S sequence length, T steps, L MoE layers, E experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, check_pass, routers_of
from simbal.config.values import whole_number
from simbal.errors import UserError
from simbal.metrics.routing import chosen_experts, overload
from simbal.model.init import generator
from simbal.model.router import Routing

MOST_DEVICES = 64  # of those that are tried unasked
DEFINITION = {
    "ep_load": "E experts on devices, E / devices neighbours on each; c: tokens sent to each expert in a step, which "
    "is so many validation sequences drawn without replacement; overload: largest sum of c on a device / mean of them",
    "overload_<devices>": "overload of a step and layer, mean over steps and layers",
    "overload_max_<devices>": "overload of a step and layer, largest of all",
    "overload_total_<devices>": "overload of the sum of c over all steps, mean over layers: what no change of the "
    "sequences evens out",
}


def ep_load(
    subject: Subject, tokens: int | None, batch_size: int, step: int, devices: list[int] | None, seed: int
) -> Result:
    """Measure the overload of every layer at each number of devices.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.
        step: sequences whose load is looked at together.
        devices: numbers of them, each a divisor of E; None: all divisors from 2 to 64.
        seed: of the order of the sequences.

    Raises:
        UserError: the model is dense, its experts cannot be shared out, there are too few sequences for a step, or a
            key is out of its range.
    """
    check_pass("ep_load", tokens, batch_size)
    whole_number("analysis.ep_load.step", step, 1)
    whole_number("analysis.ep_load.seed", seed, 0)
    routers_of(subject, "ep_load")
    numbers, sequences = _devices(subject, devices), subject.num_batches(1, tokens)
    if sequences < step:
        raise UserError(
            f"analysis.ep_load.step={step} sequences do not fit into the {sequences} that the validation windows hold"
        )
    batches = track(
        subject.predict(batch_size, tokens), "ep_load", subject.num_batches(batch_size, tokens), transient=True
    )
    counts_BLE = torch.cat([sequence_counts(batch.routings).cpu() for batch in batches])
    counts_TLE = step_counts(counts_BLE, step, seed)
    metrics, layers = _numbers(counts_TLE, numbers)
    record = {
        "definition": DEFINITION,
        "tokens": len(counts_TLE) * step * subject.seq_len,
        "steps": len(counts_TLE),
        "num_experts": subject.num_experts,
        "devices": numbers,
        "metrics": metrics,
        "layers": layers,
    }
    return Result([_table(record)], _notes(record, step, sequences), record)


def sequence_counts(routings: Sequence[Routing]) -> Tensor:
    """Return the tokens of each sequence that each layer sends to each expert, (B, L, E) int64."""
    counts = []
    for routing in routings:
        num_experts = routing.logits_NE.shape[-1]
        chosen_NE = chosen_experts(routing.topk_experts_NK, num_experts)
        counts.append(chosen_NE.view(routing.num_sequences, -1, num_experts).sum(1))
    return torch.stack(counts, 1)


def step_counts(counts_BLE: Tensor, step: int, seed: int) -> Tensor:
    """Return the sums of `step` sequences each, in a random order, (T, L, E); a rest that fills no step is left out."""
    order_B = torch.randperm(len(counts_BLE), generator=generator(seed, "ep_load/order"))
    whole_B = order_B[: len(order_B) // step * step]
    return counts_BLE[whole_B].view(-1, step, *counts_BLE.shape[1:]).sum(1)


def _numbers(counts_TLE: Tensor, devices: Sequence[int]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the metrics, and the numbers of each layer."""
    metrics, layers = {}, {}
    for number in devices:
        overload_TL, total_L = overload(counts_TLE, number), overload(counts_TLE.sum(0), number)
        metrics[f"overload_{number}"] = overload_TL.mean().item()
        metrics[f"overload_max_{number}"] = overload_TL.max().item()
        metrics[f"overload_total_{number}"] = total_L.mean().item()
        layers[f"overload_{number}"] = overload_TL.mean(0).tolist()
        layers[f"overload_max_{number}"] = overload_TL.amax(0).tolist()
        layers[f"overload_total_{number}"] = total_L.tolist()
    return metrics, layers


def _devices(subject: Subject, devices: list[int] | None) -> list[int]:
    num_experts = subject.num_experts
    divisors = [number for number in range(1, num_experts + 1) if num_experts % number == 0]
    usual = [number for number in divisors if 2 <= number <= MOST_DEVICES]
    if not (usual if devices is None else devices and {*devices} <= {*divisors}):
        raise UserError(
            f"analysis.ep_load.devices={'null' if devices is None else devices} must be a list of divisors of "
            f"num_experts={num_experts}: {', '.join(map(str, divisors))}"
        )
    return usual if devices is None else sorted({*devices})


def _table(record: dict[str, Any]) -> Table:
    metrics, layers, rows = record["metrics"], record["layers"], []
    for number in record["devices"]:
        name = f"overload_{number}"
        values = (
            metrics[name], max(layers[name]), metrics[f"overload_max_{number}"], metrics[f"overload_total_{number}"],
        )  # fmt: skip
        rows.append([str(number), str(record["num_experts"] // number), *(f"{value:.4f}" for value in values)])
    headings = ("devices", "experts\non each", "overload\nmean", "\nworst layer", "\nlargest", "\nall steps")
    return numbers_table("load of the busiest device / mean load", headings, rows, texts=0)


def _notes(record: dict[str, Any], step: int, sequences: int) -> list[str]:
    said = (
        f"{record['steps']:,} steps of {step} sequences, {record['tokens'] // record['steps']:,} tokens each, drawn "
        "from the validation split: smaller steps are less even. worst layer: its mean over steps; all steps: of the "
        "tokens of all steps together."
    )
    rest = sequences - record["steps"] * step
    return [said, f"{rest} sequences that fill no step are left out."] if rest else [said]

"""The analysis `ep_load`: how unevenly expert parallelism loads the devices.

In each step all devices wait for the busiest one, so load is counted per step, which is a group of validation
sequences. The metrics are ours; with one expert per device, overload equals MaxVio + 1 (arXiv 2408.15664).
Shapes: B sequences, S sequence length, T steps, L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, require_routers
from simbal.config.values import divisors
from simbal.errors import UserError
from simbal.metrics.routing import chosen_experts, overload
from simbal.model.init import generator
from simbal.model.router import Routing

MAX_DEVICES = 64  # largest number of devices by default
DEFINITION = {
    "ep_load": "each device holds E / devices consecutive experts; c: tokens sent to each expert in a step, which "
    "consists of validation sequences sampled without replacement; overload: load of the busiest device (the sum of c "
    "over its experts) divided by the mean load of all devices",
    "overload_<devices>": "overload, mean over steps and layers",
    "overload_max_<devices>": "overload, maximum over steps and layers",
    "overload_total_<devices>": "overload of c summed over all steps, mean over layers: the part that no order of the "
    "sequences can balance",
}


def ep_load(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    step: PositiveInt,
    devices: list[int] | None,
    seed: NonNegativeInt,
) -> Result:
    """Measure the overload of each layer for several numbers of devices.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.
        step: sequences per step.
        devices: numbers of devices, each a divisor of E; None: all divisors from 2 to 64.
        seed: seed of the sequence order.

    Raises:
        UserError: the model is dense, a number of devices does not divide E, or there are too few sequences.
    """
    require_routers(subject, "ep_load")
    num_experts, sequences = subject.num_experts, subject.num_sequences(tokens)
    allowed = divisors(num_experts)
    if devices is None:
        devices = [number for number in allowed if 2 <= number <= MAX_DEVICES]
    if not devices or not {*devices} <= {*allowed}:
        raise UserError(
            f"analysis.ep_load.devices={devices} must be a list of divisors of num_experts={num_experts}: "
            f"{', '.join(map(str, allowed))}"
        )
    if sequences < step:
        raise UserError(f"analysis.ep_load.step={step} must be at most {sequences}, the number of validation sequences")
    batches = subject.track_predictions("ep_load", batch_size, tokens)
    counts_BLE = torch.cat([sequence_counts(batch.routings).cpu() for batch in batches])
    counts_TLE = step_counts(counts_BLE, step, seed)
    steps, tokens_per_step = len(counts_TLE), step * subject.seq_len
    metrics: dict[str, float] = {}
    layers: dict[str, list[float]] = {}
    rows = []
    for number in sorted({*devices}):
        overload_TL, total_L = overload(counts_TLE, number), overload(counts_TLE.sum(0), number)
        means_L = overload_TL.mean(0)
        by_layer = {"": means_L, "_max": overload_TL.amax(0), "_total": total_L}
        layers |= {f"overload{kind}_{number}": values_L.tolist() for kind, values_L in by_layer.items()}
        over_layers = {"": means_L.mean(), "_max": overload_TL.max(), "_total": total_L.mean()}
        metrics |= {f"overload{kind}_{number}": value.item() for kind, value in over_layers.items()}
        mean, largest, total = over_layers.values()
        cells = [f"{value:.4f}" for value in (mean, means_L.max(), largest, total)]
        rows.append([str(number), str(num_experts // number), *cells])
    record = {
        "definition": DEFINITION,
        "tokens": steps * tokens_per_step,
        "steps": steps,
        "num_experts": num_experts,
        "devices": sorted({*devices}),
        "metrics": metrics,
        "layers": layers,
    }
    headings = ("devices", "experts\neach", "overload\nmean", "\nworst layer", "\nlargest", "\nall steps")
    table = numbers_table("load of the busiest device / mean load", headings, rows, texts=0)
    notes = [
        f"{steps:,} steps of {step} sequences with {tokens_per_step:,} tokens, sampled from the validation split; "
        "smaller steps are less balanced. worst layer: mean over steps; all steps: load summed over all steps."
    ]
    if rest := sequences - steps * step:
        notes.append(f"{rest} sequences that do not fill a step are ignored.")
    return Result([table], notes, record)


def sequence_counts(routings: Sequence[Routing]) -> Tensor:
    """Return how many tokens of each sequence each layer sends to each expert, (B, L, E) int64."""
    counts = []
    for routing in routings:
        num_experts = routing.logits_NE.shape[-1]
        chosen_NE = chosen_experts(routing.topk_experts_NK, num_experts)
        counts.append(chosen_NE.view(routing.num_sequences, -1, num_experts).sum(1))
    return torch.stack(counts, 1)


def step_counts(counts_BLE: Tensor, step: int, seed: int) -> Tensor:
    """Sum the counts of each step, (T, L, E): `step` sequences in random order. An incomplete step is dropped."""
    order_B = torch.randperm(len(counts_BLE), generator=generator(seed, "ep_load/order"))
    used_B = order_B[: len(order_B) // step * step]
    return counts_BLE[used_B].view(-1, step, *counts_BLE.shape[1:]).sum(1)

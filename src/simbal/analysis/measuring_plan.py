"""The analysis `plan` with `hf=`: the time, FLOPs and memory that measuring a model takes, from one window of it."""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import yaml
from rich.table import Table

from simbal.analysis.flops import duration
from simbal.analysis.shared.finding import Finding, numbers_table
from simbal.analysis.shared.host_model import HostModel
from simbal.config.options import options
from simbal.errors import UserError

TURNS, ENOUGH = 3, 5.0  # passes, and seconds after which there is no other
TARGET = "simbal.analysis.measuring_plan.measuring_plan"
DEFINITION = {
    "flops": "of one window, matrix products alone, counted while it is read; attention as if it saw all positions",
    "flops_every_expert": "the same with all experts beside the chosen ones, as PES needs them",
    "seconds": "of one window on a clock, the shortest of three, or of as many as take five seconds",
    "seconds_every_expert": "the same with all experts",
    "weight_bytes": "of the parameters in the dtype that the model is computed in",
    "logit_bytes": "of the predictions that are held at once",
    "peak_bytes": "most that this process has held up to here: of a GPU's memory, or resident on a CPU",
    "seconds_<analysis>": "tokens of its passes times the seconds of a token",
}
# plain passes and passes with all experts of each analysis, by its keys and the model
PASSES: Mapping[str, Callable[[dict[str, Any], HostModel], tuple[int, int]]] = {
    "quality": lambda keys, host: (1, 0),
    "routing": lambda keys, host: (1, 0),
    "coactivation": lambda keys, host: (1, 0),
    "margin": lambda keys, host: (1, 0),
    "ep_load": lambda keys, host: (1, 0),
    "redundancy": lambda keys, host: (1, 1),
    "dropping": lambda keys, host: (_drops(keys, host), 0),
    "pruning": lambda keys, host: (2 * keys["repeats"] * len({*keys["thresholds"]}), 0),
    "counterfactual": lambda keys, host: (1 + keys["draws"] * len(host.routers), 0),
}


def of_measuring(analyses: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the analyses of a command with `hf=`, whose `plan` is of measuring and not of training.

    Raises:
        UserError: the command sets keys of a plan of training.
    """
    if "plan" not in analyses:
        return analyses
    given, usual = analyses["plan"], _usual("plan")
    changed = [key for key, value in given.items() if value != usual.get(key)]
    if changed:
        raise UserError(f"analysis.plan.{changed[0]}= is of training, and hf= is measured: leave it out")
    of = {name: _usual(name) | analyses.get(name, {}) for name in PASSES}
    return {name: {"_target_": TARGET, "of": of} if name == "plan" else keys for name, keys in analyses.items()}


def measuring_plan(host: HostModel, of: dict[str, Any]) -> Finding:
    """Say what measuring a model takes: counted and timed in one window, with all experts and without.

    Args:
        host: the model.
        of: the keys of each analysis, by its name.
    """
    mixed = bool(host.num_experts)
    batches = [keys["batch_size"] for keys in of.values()]
    numbers: dict[str, float] = {"flops": host.counted_flops(), "seconds": _seconds(host)}
    if mixed:
        with host.similarity():
            numbers |= {"flops_every_expert": host.counted_flops(), "seconds_every_expert": _seconds(host)}
    parameters = [*host.model.parameters()]
    numbers |= {
        "weight_bytes": sum(parameter.numel() * parameter.itemsize for parameter in parameters),
        "logit_bytes": max(map(host.sequences, batches)) * host.seq_len * host.text.vocab_size * parameters[0].itemsize,
        "peak_bytes": _peak_bytes(host.device),
    }
    rows = []
    for name, keys in of.items():
        if mixed or name == "quality":
            plain, every = PASSES[name](keys, host)
            tokens = host.num_tokens(keys["tokens"])
            seconds = plain * numbers["seconds"] + every * numbers.get("seconds_every_expert", 0)
            numbers[f"seconds_{name}"] = seconds * tokens / host.seq_len
            rows.append([name, f"{tokens:,}", str(plain), str(every), duration(numbers[f"seconds_{name}"])])
    headings = ("analysis", "tokens", "passes", "with all experts", "time")
    record = {"definition": DEFINITION, "seq_len": host.seq_len, "metrics": numbers}
    return Finding([_of_a_window(host, numbers), numbers_table("time of each", headings, rows)], _notes(host), record)


def _usual(analysis: str) -> dict[str, Any]:
    """Return the keys of an analysis as its file of conf/analysis has them."""
    content = yaml.safe_load(options("analysis")[analysis].read_text(encoding="utf-8"))
    return dict(content[analysis])


def _drops(keys: dict[str, Any], host: HostModel) -> int:
    return host.choosable - host.top_k + 1 if keys["drops"] is None else len({*keys["drops"]})


def _seconds(host: HostModel) -> float:
    """Return the shortest time of a pass over one window."""
    times: list[float] = []
    while len(times) < TURNS and sum(times) < ENOUGH:
        started = time.perf_counter()
        next(host.predict(1, 1))
        if host.device.type == "cuda":
            torch.cuda.synchronize(host.device)
        times.append(time.perf_counter() - started)
    return min(times)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _of_a_window(host: HostModel, numbers: Mapping[str, float]) -> Table:
    rows = [
        ["parameters", f"{host.parameters:,}"],
        ["active parameters", f"{host.active_parameters:,}"],
        ["weights, GB", f"{numbers['weight_bytes'] / 1e9:,.2f}"],
        ["predictions held at once, GB", f"{numbers['logit_bytes'] / 1e9:,.2f}"],
        ["most memory so far, GB", f"{numbers['peak_bytes'] / 1e9:,.2f}"],
        ["FLOPs", f"{numbers['flops']:.3e}"],
        ["seconds", f"{numbers['seconds']:.3f}"],
    ]
    if "flops_every_expert" in numbers:
        rows += [
            ["FLOPs with all experts", f"{numbers['flops_every_expert']:.3e}"],
            ["seconds with all experts", f"{numbers['seconds_every_expert']:.3f}"],
        ]
    return numbers_table(f"{host.folder.name}, a window of {host.seq_len:,} tokens", ("", "value"), rows)


def _notes(host: HostModel) -> list[str]:
    said = [
        f"Counted and timed in one window on {host.device.type} in {host.dtype}; tokens are as the analyses' keys say."
    ]
    if host.num_experts:
        return said
    return [*said, f"{host.path} is a dense model: only quality and generate can be measured."]

"""Estimates whether a model fits into the memory there is, and a run's steps into what is free before it starts.

References: proc(5); cgroups v2 (memory.max, memory.current) and v1 (memory.limit_in_bytes, memory.usage_in_bytes) of
the Linux kernel's documentation.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from simbal.config.schema import TrainerConfig
from simbal.cost.memory import DeviceMemory, Step, device_memory
from simbal.cost.parameters import bytes_to_make, count, weights_of
from simbal.errors import UserError
from simbal.model.transformer import TransformerShape
from simbal.runs.spec import RunSpec
from simbal.training.shortage import smaller_micro_batches

MEMINFO, OWN_GROUP, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def memory_warning(
    spec: RunSpec, shape: TransformerShape, backend: str | None, device: torch.device, precision: str
) -> str | None:
    """Return a sentence if a step is estimated to need more memory than is free now, with what would fit; else None.

    Args:
        spec: the run, for its batch and sequence length.
        shape: the model's, which is in the computer's memory already but not yet on a GPU.
        backend: the implementation of the experts, a resolved name; None for a dense model.
        device: the device that trains.
        precision: resolved: 32-true, bf16-mixed or bf16-true.
    """
    free = free_memory(device)
    if free is None:
        return None
    trainer = spec.config.trainer
    batch, whole = trainer.micro_batch, trainer.global_batch // trainer.devices
    recomputes, seq_len = trainer.activation_checkpointing, spec.config.data.seq_len
    step = Step(batch, seq_len, batch < whole, precision, backend, device.type, recomputes)

    def needed(size: int) -> int:
        smaller = replace(step, micro_batch=size, accumulates=size < whole)
        return still_needed(device_memory(_sharing(trainer), shape, smaller, trainer.devices), device, trainer.devices)

    if needed(batch) <= free:
        return None
    fitting = (size for size in smaller_micro_batches(batch, whole) if needed(size) <= free)
    fits = next(fitting, None)
    change = (
        f"trainer.micro_batch={fits} would fit"
        if fits
        else "no micro-batch would fit: use a smaller data.seq_len or a smaller model"
    )
    return (
        f"training is estimated to need {_gigabytes(needed(batch))} more memory with trainer.micro_batch={batch}, and "
        f"{_gigabytes(free)} are free on {'the GPU' if device.type == 'cuda' else 'this computer'}: {change}"
    )


def _sharing(trainer: TrainerConfig) -> str:
    if trainer.devices == 1:
        return "one device"
    return "fsdp" if trainer.strategy == "fsdp" else "ddp"


def still_needed(memory: DeviceMemory, device: torch.device, devices: int) -> int:
    """Return the bytes of the peak that are not occupied yet.

    On a CPU all processes share the memory, and the model is built already.
    """
    return memory.peak if device.type == "cuda" else devices * memory.peak - memory.weights


def require_room(shape: TransformerShape) -> None:
    """Raise `UserError` if a model of this shape is larger than the computer's memory, before it is made."""
    needed, there = bytes_to_make(shape), whole_memory()
    if there is not None and needed > there:
        weights, layers = count(weights_of(shape)), shape.num_layers
        raise UserError(
            f"this computer has no room for the model: its {weights:,} weights in {layers:,} layers need "
            f"{_gigabytes(needed)}, and there are {_gigabytes(there)}: use a smaller model"
        )


def whole_memory() -> int | None:
    """Return the bytes that the computer has, or this process's control groups may have, with swap; None if unknown."""
    known = [*_of_meminfo("MemTotal"), *(limit for limit, _ in _limits_of_groups())]
    return min(known) + sum(_of_meminfo("SwapTotal")) if known else None


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated now; None if unknown, as on systems other than Linux."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [*_of_meminfo("MemAvailable"), *(left for _, left in _limits_of_groups())]
    return min(known, default=None)


def _of_meminfo(name: str) -> list[int]:
    """Return the bytes of an entry of /proc/meminfo, as a list that is empty where there is none."""
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def _limits_of_groups() -> list[tuple[int, int]]:
    """Return the limit of this process's control group and of each around it that has one, and the bytes left of it.

    A container may see its own group at the root, under the path that it has outside: both are looked at.
    """
    try:
        lines = OWN_GROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, names = (GROUPS / "memory", V1) if controllers else (GROUPS, V2)
            parts = path.strip("/").split("/")
            folders = {root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)}
            found += [limit for folder in folders if (limit := _limit(folder, *names)) is not None]
    return found


def _limit(group: Path, limit_file: str, used_file: str) -> tuple[int, int] | None:
    """Return the bytes that a group's processes may have together, and those left of them; None without a limit.

    Pages of files that the kernel can drop count as left, and all bytes do where the use is not known.
    """
    try:
        limit = left = int((group / limit_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such group, or "max"
        return None
    with suppress(OSError, ValueError):
        used = int((group / used_file).read_text(encoding="utf-8"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        left = max(0, limit - used + int(stat.get("inactive_file", 0)))
    return limit, left


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"

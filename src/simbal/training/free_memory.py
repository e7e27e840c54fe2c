"""Whether a run's steps fit into the memory that is free before it starts.

References: proc(5); cgroups v2 (memory.max, memory.current) and v1 (memory.limit_in_bytes, memory.usage_in_bytes) of
the Linux kernel's documentation.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from simbal.model.device_memory import DeviceMemory, device_memory
from simbal.model.memory_cost import Step
from simbal.model.transformer import TransformerShape
from simbal.run_spec import RunSpec
from simbal.training.shortage import smaller_micro_batches

MEMINFO, OWN_GROUP, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def memory_warning(
    spec: RunSpec, shape: TransformerShape, backend: str | None, device: torch.device, precision: str
) -> str | None:
    """A sentence if a training step is estimated to need more memory than is free now, with what would fit.

    Args:
        spec: of the run, for its batch and sequence length.
        shape: of the model, which is in the computer's memory already but not yet on a GPU.
        backend: of the experts, a resolved name; None for a dense model.
        device: that trains.
        precision: resolved: 32-true, bf16-mixed or bf16-true.
    """
    free = free_memory(device)
    if free is None:
        return None
    keys = spec.config["trainer"]
    batch, whole = keys["micro_batch"], keys["global_batch"] // keys["devices"]
    recomputes, seq_len = keys["activation_checkpointing"], spec.config["data"]["seq_len"]
    step = Step(batch, seq_len, batch < whole, precision, backend, device.type, recomputes)

    def needed(size: int) -> int:
        smaller = replace(step, micro_batch=size, accumulates=size < whole)
        return still_needed(device_memory(_sharing(keys), shape, smaller, keys["devices"]), device, keys["devices"])

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


def _sharing(trainer: dict[str, Any]) -> str:
    if trainer["devices"] == 1:
        return "one device"
    return "fsdp" if trainer["strategy"] == "fsdp" else "ddp"


def still_needed(memory: DeviceMemory, device: torch.device, devices: int) -> int:
    """Bytes of the peak that are not occupied yet: on a CPU, whose memory all processes share, the model is built."""
    return memory.peak if device.type == "cuda" else devices * memory.peak - memory.step.weights


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated now; None where nothing says so, as on systems other than Linux."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [free for free in (_available(), *_left_to_groups()) if free is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _left_to_groups() -> list[int]:
    """What the limits of this process's control group, and of those around it, leave.

    A container may see its own group at the root, under the path that it has outside: both are looked at.
    """
    try:
        lines = OWN_GROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, names = (GROUPS / "memory", V1) if controllers else (GROUPS, V2)
            parts = path.strip("/").split("/")
            folders = {root.joinpath(*parts[:count]) for count in range(len(parts) + 1)}
            left += [size for folder in folders if (size := _left(folder, *names)) is not None]
    return left


def _left(group: Path, limit_file: str, used_file: str) -> int | None:
    """None without a limit. Pages of files that the kernel can drop count as free."""
    try:
        limit, used = ((group / name).read_text(encoding="utf-8").strip() for name in (limit_file, used_file))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max"
        return None
    return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

"""The slots that jobs of a sweep run in, each one core or one GPU, and the environment of a job in a slot."""

import importlib.metadata
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from simbal.errors import UserError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def cpu_slots(cores: int, n_jobs: int | None, threads: int | None) -> list[dict[str, str]]:
    """Return the environments of the slots: one per core, or `n_jobs`; each job has one thread, or `threads`.

    The number of threads is fixed, so that sums do not depend on the machine.
    """
    _require_positive(n_jobs=n_jobs, threads=threads)
    environment = dict.fromkeys(THREADS, str(threads or 1))
    return [environment] * (n_jobs or max(1, cores // (threads or 1)))


def gpu_slots(
    visible: Sequence[str], gpus: Sequence[str] | None, n_jobs: int | None, threads: int | None
) -> list[dict[str, str]]:
    """Return the environments of the slots: one per visible GPU; with more jobs than GPUs several share one.

    Args:
        visible: what the sweep itself may use, in the words of CUDA_VISIBLE_DEVICES.
        gpus: a slot each, as places in `visible`: `[0,1]`, or `[0+1,2+3]` for two to a job; None: all.
        n_jobs: the number of slots; None: one for each entry of `gpus`, or visible GPU.
        threads: of the libraries in each job; None leaves them their choice.

    Raises:
        UserError: if `gpus` names one that is not visible.
    """
    _require_positive(n_jobs=n_jobs, threads=threads)
    slots = [_devices(slot, visible) for slot in gpus] if gpus else list(visible)
    environment = dict.fromkeys(THREADS, str(threads)) if threads else {}
    return [{VISIBLE: slots[i % len(slots)], **environment} for i in range(n_jobs or len(slots))]


def remote_slots(most: int, n_jobs: int | None, threads: int | None, on_gpus: bool) -> list[dict[str, str]]:
    """Return the environments of the slots of other machines, `n_jobs` or `most`, where a cluster gives out GPUs."""
    environment = cpu_slots(1, 1, threads)[0] if threads or not on_gpus else {}
    _require_positive(n_jobs=n_jobs)
    return [environment] * (n_jobs or most)


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a job could use, found without torch; none for a CPU build of torch or without a GPU."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return []
    present = [str(place) for place in range(len([*devices.glob("nvidia[0-9]*")]))]
    if VISIBLE not in environment:
        return present
    chosen = [name.strip() for name in environment[VISIBLE].split(",")]
    return [name for name in chosen if name not in ("", "-1")] if present else []


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may keep busy: those of its affinity, or fewer by its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text().split()
        return max(1, min(cores, math.ceil(int(share) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return cores


def _devices(slot: str, visible: Sequence[str]) -> str:
    places = {str(place): name for place, name in enumerate(visible)}
    try:
        return ",".join(places[place] for place in slot.split("+"))
    except KeyError:
        allowed = f"0 to {len(visible) - 1}" if visible else "none, as no GPU is visible"
        raise UserError(f"hydra.launcher.gpus: {slot} is not a GPU, or several joined by +: {allowed}") from None


def _require_positive(**counts: int | None) -> None:
    for key, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"hydra.launcher.{key}={count} must be null or at least 1")

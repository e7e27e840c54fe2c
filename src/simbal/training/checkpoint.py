"""Checkpoints that are whole or absent, and the one to continue from."""

import errno
import logging
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from simbal.atomic_file import replacing
from simbal.errors import UserError

log = logging.getLogger("simbal")
WHOLE = {"state_dict", "config_hash"}  # what every checkpoint has, of weights alone too
DAMAGED = ".damaged"  # what the name of a checkpoint ends in that cannot be used


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs and renames: a kill at any moment leaves the previous checkpoint whole.

    Lightning's own writer copies onto the final name when the temporary folder is on another disk.
    """

    def __init__(self, config_hash: str) -> None:
        """`config_hash` goes into every checkpoint: of which run it is."""
        super().__init__()
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As Lightning calls it."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint | {"config_hash": self.config_hash}, file)


class DamagedCheckpointError(Exception):
    """A file is not what was written, or never was a checkpoint; says why in a few words."""


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    path: Path | None  # of the checkpoint; None: from the beginning
    step: int
    curves: dict[str, Any]  # what the checkpoint says of metrics.jsonl at that step; empty at the beginning


def step_file(folder: Path, step: int) -> Path:
    """The checkpoint after optimizer step `step`."""
    return folder / f"step-{step:08d}.ckpt"


def weights_file(folder: Path, step: int) -> Path:
    """The weights alone after that step."""
    return folder / f"weights-{step:08d}.ckpt"


def in_folder(folder: Path) -> list[Path]:
    """The periodic checkpoints, newest first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def newest(folder: Path, config_hash: str, curves_trouble: Callable[[dict[str, Any]], str | None]) -> Start:
    """The newest checkpoint that is whole and fits; those that are not are set aside.

    Args:
        folder: of the checkpoints.
        config_hash: of the run.
        curves_trouble: what is wrong with the curves beside which a checkpoint was written, or None.

    Raises:
        UserError: a checkpoint belongs to another config.
    """
    for path in in_folder(folder):
        try:
            saved = read(path)
            curves = saved.get("callbacks", {}).get("Telemetry")
            trouble = curves_trouble(curves) if curves else "it holds weights alone"
        except DamagedCheckpointError as error:
            trouble = str(error)
        else:
            if saved["config_hash"] != config_hash:
                raise UserError(f"{path} belongs to another config: move it away, or choose another name=")
            if trouble is None:
                return Start(path, int(path.stem.removeprefix("step-")), curves)
        log.warning("%s cannot be used: %s", path, trouble)
        path.replace(path.with_name(path.name + DAMAGED))
    return Start(None, 0, {})


def read(path: Path) -> dict[str, Any]:
    """All of a checkpoint, once its checksums have been verified; tensors are mapped, and nothing in it is executed.

    The zip format has a checksum for each tensor, which torch does not look at.

    Raises:
        DamagedCheckpointError: it is not what was written.
        OSError: the disk's fault.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:
                raise DamagedCheckpointError(f"its part {bad} is damaged")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not saved.keys() >= WHOLE:
            raise DamagedCheckpointError(f"it has no {' and no '.join(sorted(WHOLE - saved.keys()))}")
    except (MemoryError, DamagedCheckpointError):
        raise
    except Exception as error:  # damage shows in as many ways as there are bytes
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedCheckpointError(type(error).__name__) from None
    return dict(saved)


def warnings(folder: Path) -> list[str]:
    """A sentence for each checkpoint that was set aside, by this process or an earlier one."""
    return [
        f"{path.name.removesuffix(DAMAGED)} was damaged: the run went on from an older one, or from its start"
        for path in sorted(folder.glob(f"*{DAMAGED}"))
    ]


def remove_periodic(folder: Path) -> None:
    """Those of a finished run, which needs them no more."""
    for path in [*in_folder(folder), *folder.glob(f"*{DAMAGED}")]:
        path.unlink(missing_ok=True)

"""Checkpoints that are whole or absent, and the one to continue from."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

NAME = "step-{step:08d}"
KEPT = "weights-{step:08d}"
NAMED_BY_STEP: dict[str, Any] = {"auto_insert_metric_name": False, "enable_version_counter": False}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs and renames: a kill at any moment leaves the previous checkpoint whole."""

    def __init__(self, config_hash: str) -> None:
        """`config_hash` goes into every checkpoint: of which run it is."""
        super().__init__()
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Lightning's own writer copies onto the final name when the temporary folder is on another disk."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint | {"config_hash": self.config_hash}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


class KeptWeights(ModelCheckpoint):
    """A class of its own: Lightning tells the states of two callbacks apart by class and interval."""


def kept(folder: Path, every: int) -> KeptWeights:
    """Keeps the weights of every `every`-th optimizer step (0: of none), so that analyses can look back."""
    return KeptWeights(folder, KEPT, every_n_train_steps=every, save_top_k=-1, save_weights_only=True, **NAMED_BY_STEP)


def periodic(folder: Path, every: int) -> ModelCheckpoint:
    """Keeps the newest checkpoint of the run, written every `every` optimizer steps."""
    return ModelCheckpoint(folder, NAME, every_n_train_steps=every, save_top_k=1, **NAMED_BY_STEP)


def newest(folder: Path) -> tuple[Path, int] | None:
    """The newest periodic checkpoint and its step, or None."""
    found = [(path, int(path.stem.removeprefix("step-"))) for path in folder.glob("step-*.ckpt")]
    return max(found, key=lambda item: item[1], default=None)

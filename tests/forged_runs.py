"""Forge runs as an attacker would, with correct checksums."""

from pathlib import Path
from typing import Any

import torch
import yaml

from simbal.runs.folder import RunFolder
from simbal.runs.spec import config_hash


def forge(path: Path, key: str, value: Any) -> None:
    """Give a finished run another value of the dotted `key` in its config, and hashes that fit."""
    folder, file = RunFolder(path), path / "config.yaml"
    record, config = folder.read_record(), yaml.safe_load(file.read_text())
    assert record is not None
    node = config
    *parents, last = key.split(".")
    for parent in parents:
        node = node[parent]
    node[last] = value
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    fitting = config_hash({name: keys for name, keys in config.items() if name != "choices"})
    folder.write_record(record | {"config_hash": fitting})
    checkpoint = path / "checkpoints" / "final.ckpt"
    if not checkpoint.exists():
        return
    torch.save(torch.load(checkpoint, weights_only=True) | {"config_hash": fitting}, checkpoint)

"""Reads the safetensors files of a folder, one or several with an index: names, sizes and kinds before any number.

Reference: https://huggingface.co/docs/safetensors; a header of JSON, then the numbers. Nothing in it can be executed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simbal.errors import UserError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")  # fp32 holds each without rounding


@dataclass(frozen=True)
class StoredWeight:
    """The file, the shape and the kind of a weight on the disk."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # as safetensors names it, such as BF16


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object from a file; `UserError` if there is none."""
    try:
        value = orjson.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{file} is damaged: it is no JSON, or cut short") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is damaged: it holds no keys with values")
    return value


def stored_weights(folder: Path) -> dict[str, StoredWeight]:
    """Return every weight of the folder by its name, from the headers of its files alone.

    Raises:
        UserError: there are no safetensors, or they are not what their index says.
    """
    if (folder / SINGLE).exists():
        return in_file(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: weights in other formats are not read")
    found: dict[str, StoredWeight] = {}
    for name, listed in shards(folder / INDEX).items():
        stored = in_file(folder / name)
        if stored.keys() != listed:
            raise UserError(f"{folder / name} does not hold the weights that {INDEX} says")
        found |= stored
    return found


def read_weights(stored: dict[str, StoredWeight]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the numbers of one weight after the other; `UserError` if a file is damaged."""
    for file in sorted({weight.file for weight in stored.values()}):
        with _opened(file) as tensors:
            for name in (name for name, weight in stored.items() if weight.file == file):
                yield name, tensors.get_tensor(name)


def shards(index: Path) -> dict[str, set[str]]:
    """Return the names of the weights in each file that an index names; `UserError` if it names none of its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} is damaged: its weight_map is missing")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise UserError(f"{index} names {file!r}, which is no safetensors file of its folder")
        shards.setdefault(file, set()).add(name)
    return shards


def in_file(file: Path) -> dict[str, StoredWeight]:
    """Return every weight of one file by its name, from its header alone; `UserError` if it is damaged."""
    with _opened(file) as tensors:
        headers = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  it is no dict
        return {
            name: StoredWeight(file, tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()
        }


def require_floats(stored: dict[str, StoredWeight]) -> None:
    """Raise `UserError` unless every weight is of a kind that fp32 holds without rounding."""
    for name, weight in stored.items():
        if weight.kind not in FLOATS:
            raise UserError(f"{weight.file}: {name!r} is of kind {weight.kind}, not one of {', '.join(FLOATS)}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None

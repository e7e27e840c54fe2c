"""Reads documents.json: what the last validation of a run measured of each document of the validation split.

No torch here: `report.py` reads documents without it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from simbal.errors import UserError
from simbal.runs.folder import DOCUMENTS_FILE


@dataclass(frozen=True)
class DocumentSums:
    """The sums of each document, in the order of the split; a document that was not seen has 0 tokens."""

    nats: Sequence[float]  # cross-entropy over its tokens
    tokens: Sequence[int]


def document_sums(run_path: Path) -> DocumentSums | None:
    """Return the sums of a run's documents; None if it has no documents.json.

    Raises:
        UserError: the file is broken; it is named.
    """
    file = run_path / DOCUMENTS_FILE
    try:
        said = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is broken: {error}") from None
    nats, tokens = _lists(said)
    if not (_are_numbers(nats) and _are_numbers(tokens) and all(isinstance(count, int) for count in tokens)):
        raise UserError(f"{file} is broken: it must have nats and tokens of each document, none below 0")
    if len(nats) != len(tokens):
        raise UserError(f"{file} is broken: it has nats of {len(nats):,} documents and tokens of {len(tokens):,}")
    return DocumentSums(array("d", nats), array("q", tokens))  # a quarter of the memory of lists


def _lists(said: Any) -> tuple[Any, Any]:
    """Return what stands under `nats` and `tokens`, of any kind."""
    return (said.get("nats"), said.get("tokens")) if isinstance(said, dict) else (None, None)


def _are_numbers(values: Any) -> bool:
    if not isinstance(values, list) or not {*map(type, values)} <= {int, float}:
        return False
    return not values or min(values) >= 0

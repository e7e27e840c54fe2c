"""The contents of record.json (how a run ended, with a checksum) and progress.json (how far a running job is).

No torch here: the sweep's parent process and `report.py` read both without it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

import orjson

# killed: by a signal, and the next sweep resumes the run; diverged: the loss or the gradient became NaN or infinite
STATUSES = ("finished", "failed", "killed", "pruned", "diverged")
REQUIRED_KEYS = {
    "finished": ("steps", "tokens", "tokens_per_second", "metrics", "definitions", "data"),
    "diverged": ("error", "step"),
}
CHECKSUM = "sha256"
PROGRESS_FILE = "progress.json"


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def digest(content: bytes) -> dict[str, Any]:
    """Return the size and sha256 of a file's content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as JSON values with a sha256 over all of them.

    Lone surrogates, as in the names of files, become question marks; `ValueError` for NaN or infinity.
    """
    plain = orjson.loads(json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    plain.pop(CHECKSUM, None)
    return {**plain, CHECKSUM: _checksum(plain)}


def verify_checksum(text: bytes) -> dict[str, Any]:
    """Return the content that `with_checksum` wrote, without its checksum; `ValueError` says what is damaged."""
    try:
        content = orjson.loads(text)
    except ValueError:
        raise ValueError("not JSON, or truncated") from None
    written = content.pop(CHECKSUM, None) if isinstance(content, dict) else None
    if written is None:
        raise ValueError("its checksum is missing")
    if written != _checksum(content):
        raise ValueError("its checksum does not match")
    return dict(content)


def parse_record(text: bytes) -> dict[str, Any]:
    """Return a record without its checksum; `ValueError` if it is damaged or lacks a key."""
    record = verify_checksum(text)
    if record.get("status") not in STATUSES:
        raise ValueError(f"status is not one of {', '.join(STATUSES)}")
    for key in ("config_hash", *REQUIRED_KEYS.get(record["status"], ())):
        if key not in record:
            raise ValueError(f"{key} is missing")
    return record


def error_of(record: Mapping[str, Any]) -> str:
    """Return the sentence that says why a run has no result, or an empty string."""
    error = str(record.get("error") or "")
    if record["status"] != "diverged":
        return error
    place = f"diverged at step {record['step']}"
    return error if place in error else f"{place}: {error}"


def _checksum(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_progress(run_path: Path) -> dict[str, Any]:
    """Return the content of a run's progress.json, or {} if it cannot be read."""
    try:
        progress = orjson.loads((run_path / PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}

"""The content of record.json, its keys, their types and a checksum over all of it, and that of progress.json.

record.json says how a run ended, progress.json where a running job is and how long it has to go.

No torch here: the sweep's parent process and `report.py` read both without it.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

import orjson

from simbal.config.values import accepts

# killed: by a signal, so that the next sweep goes on with it; diverged: its loss or gradient became NaN or infinite
STATUSES = ("finished", "failed", "killed", "pruned", "diverged")
CHECKSUM = "sha256"
PROGRESS_FILE = "progress.json"
STEPS = ("step", "max_steps")
NUMBERS = (*STEPS, "loss", "tokens_per_second", "seconds_left")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number; true and false are none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -sys.float_info.max <= value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(number is None or is_number(number) for number in value.values())


def _is_data(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("tokens"), str)


def is_digest(value: Any) -> bool:
    """Whether `value` can be what `digest` returns."""
    return isinstance(value, dict) and _is_count(value.get("bytes")) and isinstance(value.get("sha256"), str)


def _of(kind: Any) -> Callable[[Any], bool]:
    return lambda value: accepts(value, kind)


Rule = tuple[Callable[[Any], bool], str]  # a check of a value, and what the value has to be
TEXT, COUNT, MAPPING = (_of(str), "text"), (_is_count, "a whole number"), (_of(dict), "keys with values")
NUMBER = (is_number, "a number")
TEXTS = (_of(dict[str, str]), "texts by name")
ANYTHING = (_of(Any), "")
KEYS: dict[str, Rule] = {
    "status": (lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"), "config_hash": TEXT,
    "choices": TEXTS, "seed": COUNT, "error": TEXT, "warnings": (_of(list[str]), "a list of sentences"),
    "data": MAPPING, "definitions": TEXTS, "objective": MAPPING, "code": MAPPING, "versions": MAPPING,
    "device": TEXT, "threads": COUNT, "backend": ANYTHING, "backend_choice": ANYTHING, "router_init": ANYTHING,
    "precision": TEXT, "parameters": ANYTHING, "step": COUNT, "steps": COUNT, "skipped_steps": COUNT, "tokens": COUNT,
    "epochs": NUMBER, "started": TEXT, "ended": TEXT, "seconds": NUMBER, "tokens_per_second": NUMBER,
    "curves": (is_digest, "a size and a sha256"), "documents": (is_digest, "a size and a sha256"),
    "config": (is_digest, "a size and a sha256"),
    "metrics": (_is_numbers_by_name, "numbers by name"),
    "layers": (_of(dict | list[dict[str, Any]] | None), "numbers by layer"),  # of each layer if it diverged
}  # fmt: skip
REQUIRED = ("status", "config_hash")
REQUIRED_OF: dict[str, dict[str, Rule]] = {
    "finished": {
        key: KEYS[key] for key in ("steps", "tokens", "tokens_per_second", "metrics", "definitions")
    } | {"data": (_is_data, "keys with values, tokens among them")},
    "diverged": {"error": TEXT, "step": COUNT},
}  # fmt: skip


def digest(content: bytes) -> dict[str, Any]:
    """Return the size and sha256 of a file's content, by which the file is recognised."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as JSON values, with the sha256 of all of it.

    A lone surrogate, as the name of a file can hold, becomes a question mark; `ValueError` for NaN or infinity.
    """
    plain = orjson.loads(json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    plain.pop(CHECKSUM, None)
    return {**plain, CHECKSUM: _checksum(plain)}


def unsealed(text: bytes) -> dict[str, Any]:
    """Return what `sealed` has made, without its checksum.

    Raises:
        ValueError: it is no JSON object, or without the checksum of its content; a few words say why.
    """
    try:
        content = orjson.loads(text)
    except ValueError:
        raise ValueError("it is no JSON, or cut short") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no keys with values")
    written = content.pop(CHECKSUM, None)
    if written is None or written != _checksum(content):
        raise ValueError("its checksum is missing" if written is None else "its checksum is that of another content")
    return content


def parse_record(text: bytes) -> dict[str, Any]:
    """Return a record as it was written, without its checksum.

    Raises:
        ValueError: the text is no record, or no longer the one that was written; a few words say why.
    """
    record = unsealed(text)
    check(record)
    return record


def check(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a key of a record is missing or has a value of another kind; a few words say which."""
    missing = [key for key in REQUIRED if key not in record]
    for key, value in record.items() if not missing else ():
        right, kind = KEYS.get(key, ANYTHING)
        if not right(value):
            raise ValueError(f"{key} is not {kind}")
    needed = REQUIRED_OF.get(record["status"], {}) if not missing else {}
    missing += [key for key in needed if key not in record]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for key, (right, kind) in needed.items():
        if not right(record[key]):
            raise ValueError(f"{key} is not {kind}")


def error_of(record: Mapping[str, Any]) -> str:
    """Return one sentence on why the run has no result; empty if the record does not say."""
    error = str(record.get("error") or "")
    if record["status"] != "diverged":
        return error
    where = f"diverged at step {record['step']}"
    return error if where in error else f"{where}: {error}"


def _checksum(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_progress(run_path: Path) -> dict[str, Any]:
    """Return what a run's progress.json says; empty before there is one, and for one that makes no sense."""
    try:
        said = orjson.loads((run_path / PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return said if _is_progress(said) else {}


def _is_progress(said: Any) -> bool:
    """Whether `said` can be shown and computed with.

    Each number that is there is one, and a step comes with the number of steps.
    """
    if not isinstance(said, dict) or not all(said.get(key) is None or is_number(said[key]) for key in NUMBERS):
        return False
    steps = [said[key] for key in STEPS if key in said]
    return not steps or (len(steps) == 2 and None not in steps and 0 <= steps[0] <= steps[1] != 0)

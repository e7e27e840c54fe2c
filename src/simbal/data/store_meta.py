"""A store's meta.json: what it must hold for a run to use the store, and the checksum over all of it."""

import json
from pathlib import Path
from typing import Any, cast

from simbal.data.document import SPLITS
from simbal.data.overlap import Overlap
from simbal.data.sources.records import LARGEST, require_readable
from simbal.data.splits import token_dtype
from simbal.errors import UserError
from simbal.files import strict_json
from simbal.files.disk import read_bytes
from simbal.runs import record

NAME = "meta.json"
COUNTS = ("documents", "tokens", "bytes", "distinct_ids")  # of each split


def write_meta(store: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a checksum; `UserError` if it is so large that no run would read it."""
    text = json.dumps(record.sealed(meta), indent=1, allow_nan=False) + "\n"
    try:
        require_readable(text)
    except ValueError as error:
        raise UserError(f"the list of inputs does not fit into {store / NAME} ({error}): join files") from None
    (store / NAME).write_text(text, encoding="utf-8")


def read_meta(store: Path) -> dict[str, Any]:
    """Return the content of meta.json.

    Raises:
        ValueError: it is not what was written.
        OSError: it cannot be read.
    """
    text = read_bytes(store / NAME, LARGEST).decode()
    require_readable(text)
    meta = strict_json.parse(text)
    try:
        sealed = isinstance(meta, dict) and record.sealed(meta) == meta
    except RecursionError:
        sealed = False
    if not sealed:
        raise ValueError("its checksum is that of another content")
    return cast(dict[str, Any], meta)


def require_meta(store: Path, meta: dict[str, Any]) -> None:
    """Raise `UserError` if a part of a store's `meta` is missing or not of its kind."""
    try:
        _check(meta)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{store / NAME} is damaged: delete {store} and prepare it again") from None


def _check(meta: dict[str, Any]) -> None:
    counts = [meta["vocab_size"], meta["eot"], meta["surrogates_replaced"], *meta["skipped"].values()]
    counts += [meta["splits"][split][key] for split in SPLITS for key in COUNTS]
    overlap = meta["validation_overlap"]
    counts += overlap.values()
    if not all(type(count) is int and count >= 0 for count in counts) or meta["vocab_size"] < 1:
        raise ValueError("a count is no whole number")
    if min(meta["splits"][split]["tokens"] for split in SPLITS) < 1 or meta["dtype"] != token_dtype(meta["vocab_size"]):
        raise ValueError("a split has no tokens, or tokens of another type")
    Overlap(**overlap)
    texts = [meta["fingerprints"][key] for key in ("text", "tokens")] + [meta["tokenizer_sha256"] or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a fingerprint is no text")
    if not isinstance(meta["source"], dict) or not isinstance(meta["versions"], dict):
        raise TypeError("what it came from is not told")

"""What a store's meta.json must hold for a run to use it."""

from pathlib import Path
from typing import Any

from simbal.data.document import SPLITS
from simbal.data.overlap import Overlap
from simbal.data.split_writer import token_dtype
from simbal.errors import UserError

COUNTS = ("documents", "tokens", "bytes", "distinct_ids")  # of each split


def require_meta(store: Path, meta: dict[str, Any]) -> None:
    """Raise `UserError` if a part of the `meta` of this store is missing or not of its kind."""
    try:
        _check(meta)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{store / 'meta.json'} is damaged: delete {store} and prepare it again") from None


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

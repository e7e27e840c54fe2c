"""A store's meta.json, and the verification that the store is still what was prepared.

All that decides a run is read and compared with meta.json, which has a checksum over itself.

A flipped bit, a file of another store and an edited number are found; a store that was forged as a whole is not.

A verified store is remembered in its verified.json, by the stamps of the files: so it is read once on a machine, and
anew after a copy. Where that file cannot be written, the store is read each time.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from simbal.data.document import SPLITS
from simbal.data.overlap import Overlap
from simbal.data.splits import SplitFacts, facts_of, token_dtype
from simbal.errors import UserError
from simbal.runs import record

META = "meta.json"
MEMORY = "verified.json"
FILES = (META, "byte_len.bin", *(f"{split}/{file}" for split in SPLITS for file in ("tokens.bin", "docs.idx")))
MOST = 8  # machines whose verifications are remembered: each numbers a network's disk in its own way
TICK = 20_000_000  # ns, within which two changes of a file can have one time

COUNTS = ("documents", "tokens", "bytes", "distinct_ids")  # of each split

Stamps = list[list[int]]  # one for each of FILES: bytes, times of change of content and of anything, inode, device


def write_meta(store: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a checksum."""
    text = json.dumps(record.sealed(meta), indent=1, allow_nan=False) + "\n"
    (store / META).write_text(text, encoding="utf-8")


def read_meta(store: Path) -> dict[str, Any]:
    """Return the content of meta.json.

    Raises:
        ValueError: it is not what was written.
        OSError: it cannot be read.
    """
    meta = orjson.loads((store / META).read_bytes())
    if not isinstance(meta, dict) or record.sealed(meta) != meta:
        raise ValueError("its checksum is that of another content")
    return cast(dict[str, Any], meta)


def require_meta(store: Path, meta: dict[str, Any]) -> None:
    """Raise `UserError` if a part of a store's `meta` is missing or not of its kind."""
    try:
        splits, overlap = [meta["splits"][split] for split in SPLITS], meta["validation_overlap"]
        Overlap(**overlap)
        counts = [meta["vocab_size"], meta["eot"], meta["surrogates_replaced"], *meta["skipped"].values()]
        counts += [*(split[key] for split in splits for key in COUNTS), *overlap.values()]
        texts = [meta["fingerprints"]["text"], meta["fingerprints"]["tokens"], meta["tokenizer_sha256"] or ""]
        whole = (
            all(type(count) is int and count >= 0 for count in counts)
            and min(meta["vocab_size"], *(meta["splits"][split]["tokens"] for split in _filled(meta))) >= 1
            and meta["dtype"] == token_dtype(meta["vocab_size"])
            and all(isinstance(text, str) for text in texts)
            and isinstance(meta["source"], dict)
            and ("held_out" not in meta or _is_of_ends(meta))
            and isinstance(meta["versions"], dict)
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{store / META} is damaged: delete {store} and prepare it again")


def _filled(meta: dict[str, Any]) -> tuple[str, ...]:
    """Return the splits that hold documents: both, or the one that alone was prepared."""
    return (meta["only"],) if "only" in meta else SPLITS


def _is_of_ends(meta: dict[str, Any]) -> bool:
    """Whether `held_out` is what is written where ends of documents are."""
    one_in = meta["source"]["validation_one_in"]
    return bool(meta["held_out"] == "ends" and type(one_in) is int and one_in > 1)


class Verification:
    """The verification of one store; made before anything of it is read, so that no change goes unnoticed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stamps = folder, _stamps(folder)
        self._remembered = _remembered(folder)
        if not self.remembered:
            while any(abs(time.time_ns() - stamp[2]) < TICK for stamp in self._stamps):
                time.sleep(TICK / 1e9)  # so that another change has another time

    @property
    def remembered(self) -> bool:
        """Whether these very files have been found right before."""
        return self._stamps in self._remembered

    def require(self, meta: dict[str, Any], remember: bool) -> None:
        """Raise `UserError` unless the files are what `meta` says; with `remember`, note it if they are."""
        if self.remembered:
            return
        verify(self._folder, meta)
        if _stamps(self._folder) != self._stamps:
            raise UserError(f"{self._folder} changed while it was verified: start again")
        if remember:
            text = json.dumps([self._stamps, *self._remembered][:MOST])
            with suppress(OSError):  # not by replacing it: a kill leaves half a file at most, which counts for none
                (self._folder / MEMORY).write_text(text, encoding="utf-8")


def verify(folder: Path, meta: dict[str, Any]) -> dict[str, SplitFacts]:
    """Read all of the store in `folder`, whose sizes `Store.open` has compared, and return what each split holds.

    Raises:
        UserError: at the first finding, with the name of the file and what is wrong with it.
    """
    try:
        byte_len = np.fromfile(folder / "byte_len.bin", "<u2")
        compare(folder, meta, "dtype", found=token_dtype(meta["vocab_size"]))
        compare(folder, meta, "byte_len_sha256", file="byte_len.bin", found=sha256(byte_len.data).hexdigest())
        facts = {}
        for split in SPLITS:
            eot = stated(folder, meta, "eot")
            facts[split], fault = facts_of(folder / split, meta["dtype"], byte_len, eot)
            _compare_split(folder, meta, split, facts[split], fault)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{error}: delete {folder} and prepare it again") from error
    text = {split: stated(folder, meta, "splits", split, "text_sha256") for split in SPLITS}
    for name, found in fingerprints(facts, text, meta["vocab_size"]).items():
        compare(folder, meta, "fingerprints", name, found=found)
    return facts


def fingerprints(facts: dict[str, SplitFacts], text: dict[str, str], vocab_size: int) -> dict[str, str]:
    """Return the sha256 of the `text` and of the `tokens`; no path, time, machine or compression changes them."""
    lines = {
        "text": [f"{split} {digest}" for split, digest in text.items()],
        "tokens": [*(f"{split} {fact.sha256}" for split, fact in facts.items()), f"vocab_size {vocab_size}"],
    }
    return {name: sha256("\n".join(parts).encode()).hexdigest() for name, parts in lines.items()}


def damaged(folder: Path, file: str, what: str) -> UserError:
    """Return the error that says what is wrong with a file of the store in `folder`."""
    return UserError(f"{folder / file}: {what}: delete {folder} and prepare it again")


def stated(folder: Path, meta: dict[str, Any], *keys: str) -> Any:
    """Return the entry of `meta` that `keys` lead to; `UserError` if it is missing."""
    entry: Any = meta
    for key in keys:
        if not isinstance(entry, dict) or key not in entry:
            raise damaged(folder, META, f"{'.'.join(keys)} is missing")
        entry = entry[key]
    return entry


def compare(folder: Path, meta: dict[str, Any], *keys: str, found: Any, file: str = META) -> None:
    """Raise `UserError` unless the entry of `meta` that `keys` lead to is what was `found`.

    With `file`, the sha256 of that file was found: then it, and not the entry, is called damaged.
    """
    entry = stated(folder, meta, *keys)
    if entry != found and file == META:
        raise damaged(folder, file, f"{'.'.join(keys)} is {entry}, not {found}")
    if entry != found:
        raise damaged(folder, file, f"its sha256 is {found}, but {entry} in {META}")


def _compare_split(folder: Path, meta: dict[str, Any], split: str, facts: SplitFacts, fault: str) -> None:
    """Compare a split's facts with `meta`, tokens first: if they are right, docs.idx or a count is what is wrong."""
    compare(folder, meta, "splits", split, "sha256", file=f"{split}/tokens.bin", found=facts.sha256)
    if fault:
        raise ValueError(fault)
    compare(folder, meta, "splits", split, "ends_sha256", file=f"{split}/docs.idx", found=facts.ends_sha256)
    for name, found in asdict(facts).items():
        compare(folder, meta, "splits", split, name, found=found)


def _stamps(folder: Path) -> Stamps:
    """Return the stamp of each file of `FILES` that can be looked at."""
    stamps: Stamps = []
    for file in FILES:
        with suppress(OSError):
            stat = (folder / file).stat()
            stamps.append([stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev])
    return stamps


def _remembered(folder: Path) -> list[Any]:
    try:
        memory = orjson.loads((folder / MEMORY).read_bytes())
    except (OSError, ValueError):
        return []
    return memory if isinstance(memory, list) else []

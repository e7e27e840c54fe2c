"""Writes a store's folder: documents in, tokens, their statistics and their fingerprints out."""

import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.data.document import SPLITS, Document
from simbal.data.progress import build_progress
from simbal.data.sources import Encoder, Source
from simbal.errors import UserError

FORMAT = 1  # to be raised when the same config would give other files
GROUP = 1 << 20  # bytes of text that a thread encodes at once
_Encoded = list[tuple[Document, NDArray[np.uint32]]]


@dataclass
class _Totals:
    """Of a split, of an input or of everything."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of text
    text: Any = field(default_factory=sha256)  # over the digests of the documents, in order

    def add(self, document: Document, num_tokens: int, num_bytes: int) -> None:
        self.documents += 1
        self.tokens += num_tokens
        self.bytes += num_bytes
        self.text.update(document.digest)

    def as_dict(self) -> dict[str, Any]:
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return counts | {"text_sha256": self.text.hexdigest()}


class _SplitWriter:
    """Appends documents to one split's `tokens.bin` and `docs.idx`."""

    def __init__(self, folder: Path, encoder: Encoder, stack: ExitStack) -> None:
        folder.mkdir()
        self.tokens = stack.enter_context((folder / "tokens.bin").open("wb"))
        self.ends = stack.enter_context((folder / "docs.idx").open("wb"))
        self.dtype = token_dtype(encoder.vocab_size)
        self.end = 0
        self.hash = sha256()
        self.seen = np.zeros(encoder.vocab_size, bool)
        self.totals = _Totals()

    def write(self, ids: NDArray[np.uint32]) -> None:
        self.seen[ids] = True  # an IndexError for an id that `astype` would wrap around without a word
        narrow = ids.astype(self.dtype).tobytes()
        self.tokens.write(narrow)
        self.hash.update(narrow)
        self.end += len(ids)
        self.ends.write(self.end.to_bytes(8, "little"))

    def as_dict(self) -> dict[str, Any]:
        return self.totals.as_dict() | {"sha256": self.hash.hexdigest(), "distinct_ids": int(self.seen.sum())}


def token_dtype(vocab_size: int) -> str:
    """The narrowest of the two types on disk that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def build(folder: Path, source: Source, encoder: Encoder, description: dict[str, Any], progress: bool) -> None:
    """Fill the empty `folder`, `meta.json` last; `description` is what to write there about the source.

    Raises:
        UserError: for a bad input, and if a split gets no document.
    """
    skipped: Counter[str] = Counter()
    inputs: dict[str, _Totals] = defaultdict(_Totals)
    everything = _Totals()
    with ExitStack() as stack:
        writers = {split: _SplitWriter(folder / split, encoder, stack) for split in SPLITS}
        report = stack.enter_context(build_progress(progress))
        for group in _encode_in_threads(source.read(skipped), encoder):
            for document, ids in group:
                num_bytes = int(encoder.byte_len[ids].sum())
                writers[document.split].write(ids)
                for totals in (everything, inputs[document.input], writers[document.split].totals):
                    totals.add(document, len(ids), num_bytes)
            report(group[-1][0].done, everything.documents, everything.tokens, everything.bytes)
    for split, writer in writers.items():
        if not writer.totals.documents:
            raise UserError(
                f"none of the {everything.documents} documents falls into the {split} split: "
                "give more documents, data.validation_files or another data.validation_one_in"
            )
    encoder.byte_len.astype("<u2").tofile(folder / "byte_len.bin")
    meta = {"format": FORMAT, "source": description, **_meta(encoder, writers, inputs, skipped)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _meta(
    encoder: Encoder, writers: dict[str, _SplitWriter], inputs: dict[str, _Totals], skipped: Counter[str]
) -> dict[str, Any]:
    return {
        "dtype": token_dtype(encoder.vocab_size),
        "vocab_size": encoder.vocab_size,
        "eot": encoder.eot,
        "tokenizer_sha256": encoder.table_sha256,
        "splits": {split: writer.as_dict() for split, writer in writers.items()},
        "inputs": [{"name": name, **totals.as_dict()} for name, totals in inputs.items()],
        "surrogates_replaced": skipped["surrogates replaced"],
        "skipped": {reason: count for reason, count in skipped.items() if reason != "surrogates replaced"},
        "fingerprints": _fingerprints(writers, encoder.vocab_size),
        "versions": {package: version(package) for package in ("simbal", "tiktoken", "numpy")},
    }


def _fingerprints(writers: dict[str, _SplitWriter], vocab_size: int) -> dict[str, str]:
    """Of the text and of the tokens: no path, time, machine or compression in either."""
    text = [f"{split} {writer.totals.text.hexdigest()}" for split, writer in writers.items()]
    tokens = [f"{split} {writer.hash.hexdigest()}" for split, writer in writers.items()]
    lines = {"text": text, "tokens": [*tokens, f"vocab_size {vocab_size}"]}
    return {name: sha256("\n".join(parts).encode()).hexdigest() for name, parts in lines.items()}


def _encode_in_threads(documents: Iterable[Document], encoder: Encoder) -> Iterator[_Encoded]:
    """Encode group after group in as many threads as there are cores; results keep the order."""

    def encode(group: list[Document]) -> _Encoded:
        eot = np.uint32(encoder.eot)
        return [(document, np.append(encoder.encode(document.content), eot)) for document in group]

    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_Encoded]] = deque()
        for group in _groups(documents):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > 2 * threads:  # the reader is ahead: bounds the memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group

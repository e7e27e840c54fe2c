"""Writes a store's folder: documents in, tokens, their statistics and their fingerprints out."""

import json
import sys
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from simbal.data.document import SPLITS
from simbal.data.encode import Encoded, Encoders
from simbal.data.journal import NAME, Journal
from simbal.data.overlap import Overlap, shared_documents, shared_windows
from simbal.data.progress import build_progress
from simbal.data.sources import Encoder, Source
from simbal.data.split_facts import SplitFacts, facts_of
from simbal.data.split_writer import SplitWriter, sizes, token_dtype
from simbal.errors import UserError

FORMAT = 2  # to be raised when the same config would give other files


@dataclass
class _Input:
    """What a file or package has given."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of text
    text: Any = field(default_factory=sha256)  # over the digests of the documents, in order

    def add(self, encoded: Encoded) -> None:
        self.documents += 1
        self.tokens += len(encoded.ids)
        self.bytes += encoded.num_bytes
        self.text.update(encoded.document.digest)

    def as_dict(self) -> dict[str, Any]:
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return counts | {"text_sha256": self.text.hexdigest()}


def build(
    folder: Path, source: Source, encoder: Encoder, description: dict[str, Any], threads: int | None, progress: bool
) -> None:
    """Fill `folder`, `meta.json` last, going on after the units that an interrupted build had finished.

    Args:
        folder: empty, or what an earlier call with the same source and encoder left.
        source: where the documents come from.
        encoder: what turns them into ids.
        description: what to write about the source.
        threads: that encode; None: one per core.
        progress: whether to show a live view.

    Raises:
        UserError: for a bad input, and if a split gets no document.
    """
    journal = _begin(folder, source.units(), encoder.vocab_size)
    with ExitStack() as stack:
        writers = {
            split: SplitWriter(folder / split, encoder.vocab_size, documents, journal.tokens[split], stack)
            for split, documents in journal.documents.items()
        }
        encoders = stack.enter_context(Encoders(encoder, threads))
        report = stack.enter_context(build_progress(progress))
        text_bytes = 0  # read by this process
        for unit in journal.planned[len(journal.units) :]:
            inputs: dict[str, _Input] = defaultdict(_Input)
            skipped: Counter[str] = Counter()
            for group in encoders.encode(source.read(unit, skipped)):
                for encoded in group:
                    writers[encoded.document.split].write(encoded.ids, encoded.document.digest)
                    inputs[encoded.document.input].add(encoded)
                    text_bytes += encoded.num_bytes
                documents, tokens = (sum(w.documents for w in writers.values()), sum(w.end for w in writers.values()))
                report(group[-1].document.done, documents, tokens, text_bytes)
            _commit(journal, folder, unit, writers, inputs, skipped)
    overlap = _overlap(folder, encoder, journal, encoders.threads)
    _finish(folder, encoder, description, writers, journal, overlap)


def _begin(folder: Path, units: list[str], vocab_size: int) -> Journal:
    """What an interrupted build left, unless a URL's glob stands for other files by now, or some of it is gone."""
    journal = Journal.read(folder)
    whole = all(
        _size(folder / split / name) >= size
        for split in SPLITS
        for name, size in sizes(vocab_size, journal.documents[split], journal.tokens[split]).items()
        if size
    )
    if journal.planned == units and whole:
        return journal
    if journal.units:
        print("what an interrupted build left does not fit these inputs: starting over", file=sys.stderr)
    return Journal(planned=units)


def _size(file: Path) -> int:
    """In bytes; -1 of what is no file."""
    return file.stat().st_size if file.is_file() else -1


def _commit(
    journal: Journal,
    folder: Path,
    unit: str,
    writers: dict[str, SplitWriter],
    inputs: dict[str, _Input],
    skipped: Counter[str],
) -> None:
    """A kill from now on costs nothing of this unit."""
    for split, writer in writers.items():
        writer.sync()
        journal.documents[split], journal.tokens[split] = writer.documents, writer.end
    journal.units.append(unit)
    journal.inputs += [{"name": name, **given.as_dict()} for name, given in inputs.items()]
    journal.skipped.update(skipped)
    journal.write(folder)


def _finish(
    folder: Path,
    encoder: Encoder,
    description: dict[str, Any],
    writers: dict[str, SplitWriter],
    journal: Journal,
    overlap: Overlap,
) -> None:
    """Everything that the whole files say, read back from the disk."""
    encoder.byte_len.astype("<u2").tofile(folder / "byte_len.bin")
    dtype = token_dtype(encoder.vocab_size)
    facts = {split: facts_of(folder / split, dtype, encoder.byte_len) for split in SPLITS}
    text = {split: writer.text_sha256() for split, writer in writers.items()}
    surrogates = journal.skipped.pop("surrogates replaced", 0)
    meta = {
        "format": FORMAT,
        "source": description,
        "dtype": dtype,
        "vocab_size": encoder.vocab_size,
        "eot": encoder.eot,
        "tokenizer_sha256": encoder.table_sha256,
        "splits": {split: asdict(facts[split]) | {"text_sha256": text[split]} for split in SPLITS},
        "inputs": journal.inputs,
        "surrogates_replaced": surrogates,
        "skipped": dict(journal.skipped),
        "validation_overlap": overlap.as_dict(),
        "fingerprints": fingerprints(facts, text, encoder.vocab_size),
        "versions": {package: version(package) for package in ("simbal", "tiktoken", "numpy")},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    for scaffold in (folder / NAME, *(folder / split / "digests.bin" for split in SPLITS)):
        scaffold.unlink()  # the journal first: it must not outlive what it speaks of


def _overlap(folder: Path, encoder: Encoder, journal: Journal, threads: int) -> Overlap:
    for split, documents in journal.documents.items():
        if not documents:
            raise UserError(
                f"none of the {sum(journal.documents.values())} documents falls into the {split} split: "
                "give more documents, data.validation_files or another data.validation_one_in"
            )
    train, validation = (folder / split for split in SPLITS)
    documents = shared_documents(train / "digests.bin", validation / "digests.bin")
    dtype = token_dtype(encoder.vocab_size)
    tokens = [np.memmap(split / "tokens.bin", dtype, "r") for split in (train, validation)]
    windows = shared_windows(tokens[0], tokens[1], encoder.eot, threads=threads)
    return Overlap(documents, journal.documents["validation"], *windows)


def fingerprints(facts: dict[str, SplitFacts], text: dict[str, str], vocab_size: int) -> dict[str, str]:
    """Of the text and of the tokens: no path, time, machine or compression in either."""
    lines = {
        "text": [f"{split} {digest}" for split, digest in text.items()],
        "tokens": [*(f"{split} {fact.sha256}" for split, fact in facts.items()), f"vocab_size {vocab_size}"],
    }
    return {name: sha256("\n".join(parts).encode()).hexdigest() for name, parts in lines.items()}

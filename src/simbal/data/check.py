"""Is a store still what was prepared? All that decides a run is read and compared with what `meta.json` says of it.

A flipped bit, a file of another store and an edited number are found; a store that was forged as a whole is not.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from simbal.data.builder import fingerprints
from simbal.data.document import SPLITS
from simbal.data.sources import Encoder
from simbal.data.split_facts import SplitFacts, facts_of, token_chunks
from simbal.data.split_writer import token_dtype
from simbal.data.store import Store
from simbal.data.synthetic import Symbols
from simbal.data.tokenizer import Tokenizer, load_tokenizer
from simbal.errors import UserError

SAMPLE = 100  # documents of a split that are decoded, always the same
SHOWN = 200  # characters of a document


def check(store: Store, tokenizer_path: str | None) -> list[str]:
    """Read all of `store`, whose sizes `Store.open` has compared; returns what was found right, for people.

    Args:
        store: the one to check.
        tokenizer_path: where the token table is; None looks in the usual places.

    Raises:
        UserError: at the first finding, with the name of the file and what is wrong with it; also without a table.
    """
    encoder = _encoder(store, tokenizer_path)
    facts = {split: _check_tokens(store, split) for split in SPLITS}
    for split in SPLITS:
        _check_document_ends(store, split)
    _check_fingerprints(store, facts)
    lines = [
        f"checked {split}: {fact.documents:,} documents that end where docs.idx says, {fact.tokens:,} tokens, "
        f"{fact.bytes:,} bytes of text, {fact.distinct_ids:,} distinct ids, sha256 {fact.sha256[:12]}"
        for split, fact in facts.items()
    ]
    lines.append("checked the fingerprints of the text and of the tokens, and the bytes of each id")
    if isinstance(encoder, Tokenizer):
        lines += [line for split in SPLITS for line in _check_text(store, split, encoder)]
    return lines


def _damaged(store: Store, file: Path, what: str) -> UserError:
    return UserError(f"{file}: {what}: delete {store.path} and prepare it again")


def _stated(store: Store, *keys: str) -> Any:
    """The entry of `meta.json` that `keys` lead to."""
    entry: Any = store.meta
    for key in keys:
        if not isinstance(entry, dict) or key not in entry:
            raise _damaged(store, store.path / "meta.json", f"{'.'.join(keys)} is missing")
        entry = entry[key]
    return entry


def _compare(store: Store, *keys: str, found: Any) -> None:
    """An entry of `meta.json` with what everything else gives."""
    stated = _stated(store, *keys)
    if stated != found:
        raise _damaged(store, store.path / "meta.json", f"{'.'.join(keys)} is {stated}, not {found}")


def _encoder(store: Store, tokenizer_path: str | None) -> Encoder:
    """What the ids were made with; checks what it decides."""
    vocab_size = store.meta["vocab_size"]
    is_text = _stated(store, "tokenizer_sha256") is not None
    encoder: Encoder = load_tokenizer(vocab_size, tokenizer_path) if is_text else Symbols(vocab_size)
    _compare(store, "tokenizer_sha256", found=encoder.table_sha256)
    _compare(store, "dtype", found=token_dtype(vocab_size))
    _compare(store, "eot", found=encoder.eot)
    wrong = np.flatnonzero(store.byte_len != encoder.byte_len)
    if len(wrong):
        first = int(wrong[0])
        what = f"id {first} stands for {encoder.byte_len[first]} bytes of text, not {store.byte_len[first]}"
        raise _damaged(store, store.path / "byte_len.bin", what)
    return encoder


def _check_tokens(store: Store, split: str) -> SplitFacts:
    """The hash, then, as the file is the one that was written, the counts."""
    try:
        facts = facts_of(store.path / split, store.meta["dtype"], store.byte_len)
    except ValueError as error:
        raise UserError(f"{error}: delete {store.path} and prepare it again") from error
    stated = _stated(store, "splits", split, "sha256")
    if facts.sha256 != stated:
        what = f"its sha256 is {facts.sha256}, but {stated} in meta.json"
        raise _damaged(store, store.path / split / "tokens.bin", what)
    for name, found in asdict(facts).items():
        _compare(store, "splits", split, name, found=found)
    return facts


def _check_document_ends(store: Store, split: str) -> None:
    """Each document ends after an end of text, and there is no other: so they increase, up to the last token."""
    tokens, ends = store.path / split / "tokens.bin", store.document_ends(split)
    read = documents = 0
    for ids in token_chunks(tokens, store.meta["dtype"]):
        found = np.flatnonzero(ids == store.meta["eot"]) + read + 1
        stated = ends[documents : documents + len(found)]
        wrong = np.flatnonzero(found[: len(stated)] != stated)
        if len(wrong):
            first = int(wrong[0])
            what = f"document {documents + first} ends at {stated[first]}, but its end of text at {found[first]}"
            raise _damaged(store, tokens.with_name("docs.idx"), what)
        read += len(ids)
        documents += len(found)
    if documents != len(ends):
        raise _damaged(store, tokens, f"{documents} ends of text, but {len(ends)} documents in docs.idx")
    if int(ends[-1]) != read:
        raise _damaged(store, tokens, f"{read - int(ends[-1])} tokens after the last end of text")


def _check_fingerprints(store: Store, facts: dict[str, SplitFacts]) -> None:
    text = {split: _stated(store, "splits", split, "text_sha256") for split in SPLITS}
    for name, found in fingerprints(facts, text, store.meta["vocab_size"]).items():
        _compare(store, "fingerprints", name, found=found)


def _check_text(store: Store, split: str, tokenizer: Tokenizer) -> list[str]:
    """A sample is UTF-8, of as many bytes as its ids stand for, and gives the same ids again; shows one document."""
    ends, tokens = store.document_ends(split), store.tokens(split)
    sample = np.sort(np.random.default_rng(0).choice(len(ends), min(SAMPLE, len(ends)), replace=False))
    shown = ""
    for document in sample.tolist():
        ids = tokens[int(ends[document - 1]) if document else 0 : int(ends[document]) - 1]
        try:
            content = tokenizer.encoding.decode_bytes(ids.tolist())
            text = content.decode()
        except (KeyError, UnicodeDecodeError) as error:
            raise _damaged(store, store.path / split / "tokens.bin", f"document {document} is no text") from error
        if len(content) != store.byte_len[ids].sum() or not np.array_equal(tokenizer.encode(content), ids):
            what = f"document {document} is not what its text gives today"
            raise _damaged(store, store.path / split / "tokens.bin", what)
        # repr: the control characters of a text must not reach a terminal
        shown = shown or f"{split} document {document}: {text[:SHOWN]!r}"
    return [f"decoded {len(sample)} of {len(ends):,} {split} documents", shown]

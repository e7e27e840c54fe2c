"""The work of prepare.py: prepares a store, or checks an existing one to its last byte."""

from typing import Any

import numpy as np

from simbal.config.compose import checked_data
from simbal.data.document import SPLITS, Encoder
from simbal.data.sources.synthetic import Symbols
from simbal.data.splits import token_dtype
from simbal.data.store import Plan, Store, prepare
from simbal.data.tokenizer import Tokenizer, load_tokenizer
from simbal.data.verification import compare, damaged, require_meta, stated, verify
from simbal.errors import UserError

SAMPLE = 100  # documents of a split that are decoded, always the same
SHOWN = 200  # characters of a document


def prepare_or_check(plain: Any, checking: bool) -> list[str]:
    """Prepare the store of a composed `data` group; with `checking`, read an existing one to its last byte instead.

    Returns:
        Lines that say what the store holds.

    Raises:
        UserError: for a bad config, bad input, or a store that is absent or damaged.
    """
    data = checked_data(plain)
    if not checking:
        return [prepare(data, progress=True).summary()]
    plan = Plan.of(data)
    if not plan.path.exists():
        raise UserError(f"nothing is prepared yet in {plan.path}: leave out check=true")
    store = plan.require(Store.open(plan.path))
    found = check(store, data.tokenizer_path)
    require_meta(store.path, store.meta)  # checks the other entries, which no other file can confirm
    return [store.summary(), *found]


def check(store: Store, tokenizer_path: str | None) -> list[str]:
    """Read all of `store`, whose sizes `Store.open` has compared.

    Args:
        store: the one to check.
        tokenizer_path: where the token table is; None looks in the usual places.

    Returns:
        Lines for people that say what was found right.

    Raises:
        UserError: at the first finding, with the name of the file and what is wrong with it; also without a table.
    """
    encoder = _encoder(store, tokenizer_path)
    facts = verify(store.path, store.meta)
    lines = [
        f"checked {split}: {fact.documents:,} documents that end where docs.idx says, {fact.tokens:,} tokens, "
        f"{fact.bytes:,} bytes of text, {fact.distinct_ids:,} distinct ids, sha256 {fact.sha256[:12]}"
        for split, fact in facts.items()
    ]
    lines.append("checked the fingerprints of the text and of the tokens, and the bytes of each id")
    if isinstance(encoder, Tokenizer):
        lines += [line for split in SPLITS for line in _check_text(store, split, encoder)]
    return lines


def _encoder(store: Store, tokenizer_path: str | None) -> Encoder:
    """Return the encoder of a store's ids, and check what follows from it: the token table, dtype, eot, byte_len."""
    vocab_size = store.meta["vocab_size"]
    is_text = stated(store.path, store.meta, "tokenizer_sha256") is not None
    encoder: Encoder = load_tokenizer(vocab_size, tokenizer_path) if is_text else Symbols(vocab_size)
    decided = {"tokenizer_sha256": encoder.table_sha256, "dtype": token_dtype(vocab_size), "eot": encoder.eot}
    for key, found in decided.items():
        compare(store.path, store.meta, key, found=found)
    wrong = np.flatnonzero(store.byte_len != encoder.byte_len)
    if len(wrong):
        first = int(wrong[0])
        what = f"id {first} stands for {encoder.byte_len[first]} bytes of text, not {store.byte_len[first]}"
        raise damaged(store.path, "byte_len.bin", what)
    return encoder


def _check_text(store: Store, split: str, tokenizer: Tokenizer) -> list[str]:
    """Check a sample of a split's documents, and show one.

    Each is UTF-8, has as many bytes as its ids stand for, and gives the same ids again.
    """
    ends, tokens = store.document_ends(split), store.tokens(split)
    sample = np.sort(np.random.default_rng(0).choice(len(ends), min(SAMPLE, len(ends)), replace=False))
    shown = ""
    for document in sample.tolist():
        ids = tokens[int(ends[document - 1]) if document else 0 : int(ends[document]) - 1]
        try:
            content = tokenizer.encoding.decode_bytes(ids.tolist())
            text = content.decode()
        except (KeyError, UnicodeDecodeError) as error:
            raise damaged(store.path, f"{split}/tokens.bin", f"document {document} is no text") from error
        if len(content) != store.byte_len[ids].sum() or not np.array_equal(tokenizer.encode(content), ids):
            what = f"document {document} is not what its text gives today"
            raise damaged(store.path, f"{split}/tokens.bin", what)
        # repr: the control characters of a text must not reach a terminal
        shown = shown or f"{split} document {document}: {text[:SHOWN]!r}"
    return [f"decoded {len(sample)} of {len(ends):,} {split} documents", shown]

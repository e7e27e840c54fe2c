"""The work of prepare.py: prepare a store, or check an existing one to its last byte."""

from typing import Any

import numpy as np

from simbal.config.check import checked_data
from simbal.data.document import SPLITS
from simbal.data.store import Plan, Store, prepare
from simbal.data.tokenizer import Tokenizer, load_tokenizer
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
    store = Store.open(plan.path, again=True)
    lines = [store.summary(), f"checked the sha256 of all {len(store.meta['files'])} files"]
    if data.source != "synthetic":
        encoder = load_tokenizer(data.vocab_size, data.tokenizer_path)
        lines += [line for split in SPLITS for line in _check_sample(store, split, encoder)]
    return lines


def _check_sample(store: Store, split: str, encoder: Tokenizer) -> list[str]:
    """Check that the text of some documents gives the same ids again, and show one."""
    ends, tokens = store.document_ends(split), store.tokens(split)
    sample = np.sort(np.random.default_rng(0).choice(len(ends), min(SAMPLE, len(ends)), replace=False))
    shown = ""
    for document in sample.tolist():
        ids = tokens[int(ends[document - 1]) if document else 0 : int(ends[document]) - 1]
        content = encoder.encoding.decode_bytes(ids.tolist())
        if not np.array_equal(encoder.encode(content), ids):
            file = store.path / split / "tokens.bin"
            raise UserError(f"{file}: document {document} is tokenized otherwise today: prepare it again")
        # repr: the control characters of a text must not reach a terminal
        shown = shown or f"{split} document {document}: {content.decode()[:SHOWN]!r}"
    return [f"decoded {len(sample)} of {len(ends):,} {split} documents", shown]

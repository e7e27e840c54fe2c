"""cl100k_base, whole or cut to its first ids.

Every rank from 256 on is one merge of two earlier ranks, so each prefix of the table is a complete byte-pair encoding.
"""

import base64
import re
import threading
from collections.abc import Iterator
from itertools import islice
from typing import cast

import numpy as np
import tiktoken
from numpy.typing import NDArray

from simbal.data import token_table

RANKS = 100_256
FULL = 100_277  # ids 100256 and 100258 to 100276 never occur; cl100k_base has them, so the embedding does
PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
PIECE = 1 << 20  # characters of a long text that are encoded at once
CUT = re.compile(r"\n(?=\S)")  # no token spans such a newline


class Tokenizer:
    """Ids below `vocab_size`, `eot` among them; text that spells a special token stays text."""

    def __init__(self, ranks: dict[bytes, int], vocab_size: int, eot: int, table_sha256: str) -> None:
        self.vocab_size, self.eot, self.table_sha256 = vocab_size, eot, table_sha256
        self.byte_len: NDArray[np.uint16] = np.zeros(vocab_size, np.uint16)
        self.byte_len[list(ranks.values())] = [len(token) for token in ranks]
        self.ranks, self._of_thread = ranks, threading.local()

    @property
    def encoding(self) -> tiktoken.Encoding:
        """One for each thread: the regular expression inside is a third slower in all threads but its first."""
        if not hasattr(self._of_thread, "encoding"):
            self._of_thread.encoding = tiktoken.Encoding(
                f"cl100k_base_{self.vocab_size}",
                pat_str=PATTERN,
                mergeable_ranks=self.ranks,
                special_tokens={"<|endoftext|>": self.eot},
            )
        return cast(tiktoken.Encoding, self._of_thread.encoding)

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """The ids of UTF-8 `content`, without `eot`."""
        pieces = [self.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(content.decode())]
        return np.concatenate(pieces, dtype=np.uint32)


def load_tokenizer(vocab_size: int, path: str | None = None) -> Tokenizer:
    """The first `vocab_size` - 1 ranks and end of text (257 to 100257), or all of cl100k_base (100277).

    Raises:
        UserError: if the token table is in none of the usual places, or not at `path`.
    """
    table = token_table.read_token_table(path)
    eot = RANKS + 1 if vocab_size == FULL else vocab_size - 1
    lines = islice(table.splitlines(), min(eot, RANKS))
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return Tokenizer(ranks, vocab_size, eot, token_table.SHA256)


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text where the tokens stay the same."""
    start = 0
    while len(text) - start > PIECE and (cut := CUT.search(text, start + PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]

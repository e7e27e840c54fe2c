"""The sources `files` and `dclm`: documents that are read, and input that is refused with its position."""

import codecs
import gzip
import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from simbal.data.prepare import open_source, prepare
from simbal.errors import UserError
from tests.data.conftest import decode


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
    "text not UTF-8": (".txt", codecs.BOM_UTF8 + b"caf\xe9 au lait", "position 3.*data.encoding"),
    "line not UTF-8": (".jsonl", RECORD + b'{"text": "caf\xe9"}\n', "line 2: .*position 13.*data.encoding"),
    "not JSON": (".jsonl", RECORD + b'{"text": "a"\n', "line 2: .*JSON"),
    "deep JSON": (".jsonl", b"[" * 100_000, "line 1: .*JSON"),
    "not an object": (".jsonl", b"[1]\n", "line 1: .*list"),
    "no text": (".jsonl", RECORD + b'{"body": 1, "id": 1}', "line 2: .*'body', 'id'.*data.text_key"),
    "null text": (".jsonl", b'\n{"text": null}\n', "line 2: no text under 'text'"),
    "zstd cut by a byte": (".jsonl.zst", ZST[:-1], "truncated"),
    "second frame cut": (".jsonl.zst", ZST + ZST[:-1], "after line 1000: .*truncated"),
    "no zstd": (".jsonl.zst", RECORD, "after line 0: zstd"),
    "gzip cut by a byte": (".jsonl.gz", GZ[:-1], "after line .*end-of-stream"),
    "no gzip": (".jsonl.gz", RECORD, "after line 0: Not a gzipped file"),
    "no column": (".parquet", parquet(["a"], "body"), "no column 'text' .*'id', 'body'.*data.text_key"),
    "column of numbers": (".parquet", parquet([1, 2]), "'text' must contain text: set data.text_key"),
    "null in a column": (".parquet", parquet(["a"] * 5 + [None]), "row 6: .*null"),
    "column not UTF-8": (".parquet", parquet([b"cafe", b"caf\xe9"]), "row 2: .*data.encoding"),
    "parquet cut short": (".parquet", TABLE[:-9], "cannot be read"),
    "no parquet": (".parquet", RECORD, "cannot be read"),
    "unknown extension": (".csv", b"a,b\n", "must end in one of .txt .jsonl .jsonl.gz .jsonl.zst .parquet"),
}  # fmt: skip


@pytest.mark.parametrize(("extension", "content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_with_its_position_and_leaves_no_folder(keys, tmp_path, extension, content, message):
    path = tmp_path / f"bad{extension}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}.*{message}"):
        prepare(keys("files", files=str(path), vocab_size=300), progress=False)
    assert not [entry for entry in (tmp_path / "cache").glob("*") if entry.is_dir()]


def test_line_ends_blank_lines_and_a_byte_order_mark_are_handled(texts):
    content = codecs.BOM_UTF8 + b'{"text": "a"}\r\n\r\n   \n{"text": "b"}\n\n{"text": "c"}'
    assert texts("a.jsonl", content) == texts("a.jsonl.zst", zstandard.compress(content)) == (["a", "b", "c"], {})
    assert texts("a.txt", codecs.BOM_UTF8 + b"a\r\nb")[0] == ["a\r\nb"]
    line = json.dumps({"text": "one\u2028\u0085two"}, ensure_ascii=False).encode()
    for extension, pack in PACK.items():  # with two frames or members
        assert texts(f"b{extension}", pack(line + b"\n") + pack(line))[0] == ["one\u2028\u0085two"] * 2


def test_a_txt_is_one_document_or_one_per_block_of_lines(texts):
    content = codecs.BOM_UTF8 + b"\n\none\r\ntwo\r\n \t\n\nthree\xc2\xa0\n"
    assert texts("a.txt", content)[0] == [content.decode("utf-8-sig")]
    assert texts("a.txt", content, txt_split="blank_lines")[0] == ["one\r\ntwo", "three\xa0"]


def test_empty_texts_and_replaced_surrogates_are_counted(texts):
    content = b'{"text": ""}\n{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n'
    found, skipped = texts("a.jsonl", content)
    assert found == ["a\ufffd", "😀"]
    assert skipped == {"empty text": 1, "surrogates replaced": 1}


def test_other_keys_encodings_and_kinds_of_columns_can_be_read(texts):
    assert texts("a.jsonl", '{"body": "café"}'.encode("latin-1"), encoding="latin-1", text_key="body")[0] == ["café"]
    assert texts("a.parquet", parquet([b"caf\xe9"]), encoding="latin-1")[0] == ["café"]
    assert texts("a.parquet", parquet([b"a \xc3\xa9\0"]))[0] == ["a é\0"]
    assert texts("a.parquet", parquet(pa.array(["a", "b", "a"]).dictionary_encode()))[0] == ["a", "b", "a"]
    with pytest.raises(UserError, match="unknown encoding: klingon"):
        texts("a.txt", b"a", encoding="klingon")


@pytest.mark.parametrize("line", [b"no json", b"{}", b'{"text": 1}', b'{"text": "caf\xe9"}'])
def test_at_most_one_bad_record_in_a_thousand_is_skipped(texts, line):
    found, skipped = texts("a.jsonl", RECORD * 500 + line + b"\n" + RECORD * 499, on_bad_record="skip")
    assert (len(found), skipped["bad record"]) == (999, 1)
    with pytest.raises(UserError, match="a.jsonl, line 501: .*1 of 999 records.*data.on_bad_record=skip"):
        texts("a.jsonl", RECORD * 500 + line + b"\n" + RECORD * 498, on_bad_record="skip")


def packed(texts, extension):
    """The file's bytes; Parquet cannot hold lone surrogates, so they are replaced before."""
    if extension == ".parquet":
        return parquet([replaced(text) for text in texts], row_group_size=3)
    return PACK[extension]("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def replaced(text):
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(texts=TEXTS, extension=st.sampled_from([*PACK, ".parquet"]))
def test_any_text_is_recovered_from_the_store(load_keys, tmp_path_factory, texts, extension):
    folder = tmp_path_factory.mktemp("any")
    train, validation = folder / f"train{extension}", folder / "validation.txt"
    train.write_bytes(packed([*texts, "last"], extension))
    validation.write_text("held out")
    files = {"files": str(train), "validation_files": str(validation), "vocab_size": 300}
    store = prepare(load_keys("files", folder / "cache", **files), progress=False)
    assert decode(store, "train") == [replaced(text) for text in [*texts, "last"] if text]
    assert decode(store, "validation") == ["held out"]


def test_documents_of_the_validation_split_that_are_also_in_train_are_counted(keys, jsonl):
    texts = [f"{name} has a text of its own, " * 40 for name in ("first", "second", "third")]
    files = {"files": str(jsonl(texts[:2], "a.jsonl")), "validation_files": str(jsonl(texts[1:], "b.jsonl"))}
    store = prepare(keys("files", vocab_size=300, **files), progress=False)
    overlap = store.meta["validation_overlap"]
    assert (overlap["documents"], overlap["validation_documents"]) == (1, 2)
    assert 0 < overlap["windows"] < overlap["validation_windows"]
    assert "validation overlap: 1 of 2 documents" in store.summary()


def test_documents_are_held_out_by_their_own_hash(keys, jsonl):
    texts = [f"document {number}" for number in range(400)]
    stores = [
        prepare(keys("files", files=str(jsonl(part, f"{len(part)}.jsonl")), vocab_size=300, validation_one_in=4), False)
        for part in (texts, texts[:200])
    ]
    (held_out, train), (fewer, _) = (
        [set(decode(store, split)) for split in ("validation", "train")] for store in stores
    )
    assert 60 < len(held_out) < 140
    assert held_out | train == set(texts)
    assert not held_out & train
    assert fewer < held_out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("{tmp}/missing.txt", "data.files: no file matches"),
        ("{tmp}/*.jsonl.zst", "data.files: no file matches"),
        ("{tmp}", "data.files: .* is a folder"),
        ([], "data.files is empty"),
        (["{tmp}/a.jsonl", "{tmp}/*.jsonl"], "listed twice"),
    ],
)
def test_names_without_text_are_refused(keys, jsonl, tmp_path, files, message):
    jsonl(["a text"], "a.jsonl")
    names = [name.replace("{tmp}", str(tmp_path)) for name in ([files] if isinstance(files, str) else files)]
    with pytest.raises(UserError, match=message):
        prepare(keys("files", files=names), progress=False)


def test_a_missing_validation_file_is_reported_under_its_key(keys, jsonl, shards):
    file = jsonl(["a text"], "a.jsonl")
    with pytest.raises(UserError, match="data.validation_files: no file matches nowhere"):
        prepare(keys("files", files=str(file), validation_files="nowhere.txt"), progress=False)
    with pytest.raises(UserError, match="data.location: no file matches"):
        prepare(shards(first_shard=7), progress=False)


def test_files_of_any_name_are_prepared_and_found_again(keys, tmp_path):
    for number, name in enumerate((b"caf\xe9", "café".encode(), b"a\nb", b".hidden")):
        path = tmp_path / os.fsdecode(name + b".jsonl")
        path.write_text("".join(json.dumps({"text": f"text {n} of {number}"}) + "\n" for n in range(20)))
    data = keys("files", files=f"{tmp_path}/*.jsonl", vocab_size=300, validation_one_in=4)
    store = prepare(data, progress=False)
    assert sum(split["documents"] for split in store.meta["splits"].values()) == 60
    assert prepare(data, progress=False).path == store.path


@pytest.fixture
def shards(tmp_path, jsonl, keys):
    """`shards(num_shards=2)`: the keys of shards 0 to 4, each of which has ten texts that name it."""
    for shard in range(5):
        jsonl([f"text {number} of shard {shard}" for number in range(10)], f"CC_shard_{shard:04d}.jsonl")
    location = f"{tmp_path}/CC_shard_{{shard:04d}}.jsonl"
    return lambda **changed: keys("dclm", **{"location": location, "vocab_size": 300, **changed})


def test_dclm_reads_the_shards_and_holds_out_the_validation_shard(shards):
    store = prepare(shards(first_shard=1, num_shards=2, validation_shard=4), progress=False)
    assert [name[-10:] for name in store.meta["inputs"]] == ["0001.jsonl", "0002.jsonl", "0004.jsonl"]
    assert [len(store.document_ends(split)) for split in ("train", "validation")] == [20, 10]


def test_dclm_names_its_shards_and_its_identity_needs_no_network(keys, shards):
    start = "hf://datasets/mlfoundations/dclm-pool-400m-1x@main/CC_shard_0000"
    source = open_source(keys("dclm", num_shards=2))
    assert source.inputs() == [f"{start}{number}.jsonl.zst" for number in ("0000", "0001", "2827")]
    local = [open_source(shards(num_shards=n, validation_shard=v)).identity() for n, v in ((1, 3), (2, 3), (1, 4))]
    assert len({str(identity) for identity in [source.identity(), *local]}) == 4
    for name in ("a", "{shard:04d", "{shard}{x}"):
        with pytest.raises(UserError, match="must contain {shard}.* no other braces"):
            open_source(keys("dclm", location=f"s3://bucket/{name}.jsonl"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"validation_shard": 2828}, "data.validation_shard=2828 must be at most 2827"),
        ({"first_shard": 2800, "num_shards": 29}, "data.first_shard=2800 and data.num_shards=29 end at shard 2828"),
        ({"validation_shard": 257}, "data.validation_shard=257 is one of the training shards, 0 to 257"),
    ],
)
def test_shards_that_do_not_exist_or_overlap_are_refused(keys, changed, message):
    keys("dclm", validation_shard=258)
    with pytest.raises(UserError, match=message):
        keys("dclm", **changed)

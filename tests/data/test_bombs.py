"""Small files that stand for more than a machine can hold: the memory to read them is bounded."""

import gzip
import json
import subprocess
import sys
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from simbal.data import builder as encode
from simbal.data.builder import Encoders
from simbal.data.document import Document
from simbal.data.sources import records as json_size
from simbal.data.sources.records import require_readable
from simbal.data.sources.synthetic import Symbols

MIB = 1 << 20
READS = """
import resource, sys
from collections import Counter
from itertools import islice
from pyarrow import parquet
from simbal.data import tokenizer
from simbal.data.sources.files import Files
from simbal.data.sources.records import read_lines
from simbal.errors import UserError

file, how = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    if how == "table":
        tokenizer.read_token_table(file)
    elif how == "first line":
        next(read_lines(open(file, "rb"), ".jsonl.zst"))
    else:
        source = Files(file, None, "text", "utf-8", "file", "error", 3, ".")
        for document in islice(source.read(*source.units(), Counter()), 3):
            print(len(document.content))
except UserError as error:
    print(str(error).splitlines()[0])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def zstd(head, block, count, tail=b""):
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join([packer.compress(part) for part in (head, *[block] * count, tail)]) + packer.flush()


def gz(block, count):
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(block) for _ in range(count)) + packer.flush()


def peak_mib(path, how=""):
    """Of a process that reads the file, less what it takes to start; and what it says."""
    done = subprocess.run([sys.executable, "-c", READS, str(path), how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *said, peak = done.stdout.splitlines()
    return int(peak), said


@pytest.mark.slow
def test_a_line_without_end_is_refused_before_it_is_unpacked(tmp_path):
    bombs = {"a.jsonl.zst": zstd(b"", b"x" * MIB, 3000), "a.jsonl.gz": gz(b"x" * MIB, 400)}
    for name, content in bombs.items():
        assert len(content) < 4 * MIB
        (tmp_path / name).write_bytes(content)
        peak, said = peak_mib(tmp_path / name)
        assert said == [f"{tmp_path / name}, line 1: the line is longer than 256 MiB"]
        assert peak < 600  # all of it is 3,000 MiB


@pytest.mark.slow
def test_lines_of_nothing_are_not_held_at_once(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(b"", b"\n" * MIB, 400))
    assert peak_mib(tmp_path / "a.jsonl.zst", "first line")[0] < 250  # pointers to all lines take 3,200 MiB


@pytest.mark.parametrize(
    "value", [pytest.param(b"[],", id="lists"), pytest.param(b'{"a":{}},', id="objects", marks=pytest.mark.slow)]
)
def test_a_line_of_countless_values_is_refused_before_it_is_parsed(tmp_path, value):
    content = zstd(b'{"text": [', value * (MIB // len(value)), 48, b"0]}\n")
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    peak, said = peak_mib(tmp_path / "a.jsonl.zst")
    sentence = "line 1: the JSON is too large (it holds more than 1,048,576 values)"
    assert said == [f"{tmp_path / 'a.jsonl.zst'}, {sentence}"]
    assert peak < 300  # parsed, it takes more than 1,000 MiB


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False], ids=["as a dictionary", "as text"])
def test_a_dictionary_in_parquet_is_not_repeated_in_memory(tmp_path, stored):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["y" * 20_000_000]))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="zstd", store_schema=stored)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    peak, said = peak_mib(tmp_path / "a.parquet")
    assert said == ["20000000"] * 3
    assert peak < 1000  # all rows take 20,000 MB


@pytest.mark.slow
def test_a_token_table_is_not_unpacked_further_than_one_can_be(tmp_path):
    (tmp_path / "table.gz").write_bytes(gz(b"\0" * MIB, 400))
    peak, said = peak_mib(tmp_path / "table.gz", "table")
    assert said[0].startswith("the cl100k_base token table was not found")
    assert peak < 150  # all of it is 400 MiB


def test_a_long_document_may_hold_any_number_of_commas(texts):
    text = 'a,b [1], {2} "quoted", \\ ' * 400_000
    assert sum(map(text.count, json_size.BEGINS_VALUE)) > json_size.MOST_VALUES
    assert texts("a.jsonl", json.dumps({"text": text}).encode())[0] == [text]
    assert texts("a.jsonl.gz", gzip.compress(json.dumps({"id": [1, 2], "text": text, "b": {}}).encode()))[0] == [text]


@pytest.mark.parametrize("quotes", [b'"' * 9, b'"\\"', b'"\\', b'\\"', b'"a"'])
def test_the_size_of_any_text_is_found_in_one_pass(texts, quotes):
    """A pass for each quotation mark would take days."""
    with pytest.raises(ValueError, match="more than"):
        require_readable("," * json_size.MOST_VALUES + "[" + (quotes * 200_000).decode())


def test_no_more_text_waits_to_be_encoded_than_can_be_held(monkeypatch):
    monkeypatch.setattr(encode, "GROUP", 40)
    monkeypatch.setattr(encode, "MOST", 120)
    given = []

    def documents():
        for number in range(9):
            given.append(number)
            yield Document("train", "a", bytes(40), b"", 0.0)

    with Encoders(Symbols(4), threads=8) as encoders:
        groups = encoders.encode(documents())
        next(groups)
        assert len(given) == 4  # three wait, and the fourth lets the first go
        assert len(list(groups)) == 8

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simbal.errors import UserError


def parquet(column, kind=None, name="text", **options):
    """A file's bytes with one column, and another that nobody asks for."""
    file = io.BytesIO()
    table = pa.table({"id": pa.array(range(len(column))), name: pa.array(column, kind)})
    pq.write_table(table, file, row_group_size=4, **options)
    return file.getvalue()


WHOLE = parquet(["a text"] * 100, compression="none")


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary"])
def test_a_column_of_text_or_of_its_bytes_is_read_row_group_after_row_group(texts, kind):
    written = [f"{number} é\0 \u2028" for number in range(10)]
    column = [text.encode() for text in written] if "binary" in kind else written
    assert texts("a.parquet", parquet(column, getattr(pa, kind)()))[0] == written


def test_a_missing_column_stops_and_says_which_there_are(texts):
    with pytest.raises(
        UserError, match="a.parquet: no column 'text', or .* .there is 'id', 'body'.: set data.text_key"
    ):
        texts("a.parquet", parquet(["a"], name="body"))


def test_bytes_that_are_no_text_stop_with_the_record(texts):
    latin = parquet([b"cafe", b"caf\xe9"])
    with pytest.raises(UserError, match="a.parquet, record 2: byte 3 of it is not utf-8: set data.encoding"):
        texts("a.parquet", latin)
    assert texts("a.parquet", latin, encoding="latin-1")[0] == ["cafe", "café"]


@pytest.mark.parametrize("content", [b"", b"PAR1", WHOLE[:-1], WHOLE[:-9], WHOLE[: len(WHOLE) // 2], b"x" * 1000])
def test_a_file_that_is_cut_short_or_no_parquet_stops(texts, content):
    with pytest.raises(UserError, match="a.parquet: this is not parquet, or damaged"):
        texts("a.parquet", content)


def test_damage_in_the_middle_stops(texts):
    whole = parquet([f"text {n}" for n in range(8)], compression="zstd", use_dictionary=False)
    at = whole.rindex(b"\x28\xb5\x2f\xfd")  # the last zstd frame, of the second row group
    with pytest.raises(UserError, match="a.parquet(, record 5)?: this is not parquet, or damaged"):
        texts("a.parquet", whole[:at] + b"junk" + whole[at + 4 :])

"""The texts of a .parquet file: one column, read a few rows at a time."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from simbal.data.lines import BrokenFileError
from simbal.data.records import BadRecord, Format, Record, not_encoded
from simbal.errors import UserError

ROWS = 1024  # decoded at once


def read_parquet(file: BinaryIO, rules: Format) -> Iterator[Record]:
    """The text of each row; binary columns are taken for text in `encoding`, which must be true of every row.

    Raises:
        BrokenFileError: for a file that is cut short or damaged, or has no such column of text.
        UserError: without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            ".parquet needs the package pyarrow, which is not installed: pip install 'simbal[parquet]'"
        ) from None
    number = 0
    try:
        table = ParquetFile(file)
        encoding = _encoding_of(table.schema_arrow, rules)
        rows = table.metadata.num_rows
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[rules.text_key], use_threads=False):
                for value in _as_bytes(batch.column(0)):
                    number += 1
                    yield _text(value, encoding, rules.text_key, f"record {number}"), number / rows
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        where = f"record {number + 1}" if number else None
        raise BrokenFileError(f"this is not parquet, or damaged ({reason})", where) from None


def _encoding_of(schema: Any, rules: Format) -> str:
    """Of the column's bytes; the schema comes first, as pyarrow reads a missing column as no columns at all."""
    from pyarrow import types

    key = rules.text_key
    if schema.names.count(key) != 1:
        columns = ", ".join(map(repr, schema.names)) or "none"
        raise BrokenFileError(f"no column {key!r}, or more than one (there is {columns}): set data.text_key")
    kind = schema.field(key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "utf-8"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return rules.encoding
    raise BrokenFileError(f"column {key!r} must hold text, not {kind}: set data.text_key")


def _as_bytes(column: Any) -> Iterator[bytes | None]:
    """Not as text: nothing makes a writer put valid UTF-8 into a column of text, and pyarrow would raise for all."""
    import pyarrow as pa

    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return (value.as_py() for value in plain.cast(pa.large_binary()))


def _text(value: bytes | None, encoding: str, key: str, place: str) -> str | BadRecord:
    if value is None:
        return BadRecord("null as text", place, f"{key!r} must hold text, not null")
    try:
        return value.decode(encoding)
    except UnicodeDecodeError as error:
        return not_encoded(place, f"byte {error.start} of it is ", encoding)

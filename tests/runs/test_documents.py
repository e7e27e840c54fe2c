"""documents.json is read as it was written, and refused in a sentence where it is broken."""

import pytest

from simbal.errors import UserError
from simbal.runs.curves import document_sums


def test_the_sums_are_read_by_document(tmp_path):
    assert document_sums(tmp_path) is None
    (tmp_path / "documents.json").write_text('{"nats": [3.5, 0, 2], "tokens": [2, 0, 1], "bytes": [9, 0, 4]}')
    found = document_sums(tmp_path)
    assert ([*found.nats], [*found.tokens]) == ([3.5, 0.0, 2.0], [2, 0, 1])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is broken"),
        ("[]", "must have nats and tokens"),
        ('{"nats": [1.0]}', "must have nats and tokens"),
        ('{"nats": [NaN], "tokens": [1]}', "unexpected character"),
        ('{"nats": [1e999], "tokens": [1]}', "is broken"),
        ('{"nats": [-1.0], "tokens": [1]}', "none below 0"),
        ('{"nats": [1.0], "tokens": [-1]}', "none below 0"),
        ('{"nats": [1.0], "tokens": [1.5]}', "must have nats and tokens"),
        ('{"nats": [true], "tokens": [1]}', "must have nats and tokens"),
        ('{"nats": [1.0, 2.0], "tokens": [1]}', "nats of 2 documents and tokens of 1"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, text, why):
    file = tmp_path / "documents.json"
    file.write_text(text)
    with pytest.raises(UserError, match=f"{file}.*{why}"):
        document_sums(tmp_path)

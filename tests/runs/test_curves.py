"""Rows of metrics.jsonl: a truncated last line is ignored, any other broken line is an error."""

import json

import pytest

from simbal.errors import UserError
from simbal.runs.curves import curve, rows


def test_a_truncated_last_line_is_ignored(tmp_path):
    points = [(0, 9.0), (50, 4.0), (100, 3.0)]
    lines = [json.dumps({"step": tokens // 10, "tokens": tokens, "val/loss": loss}) for tokens, loss in points]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 11, "tokens": 110, "val/lo']))
    assert curve(tmp_path, "val/loss") == points
    assert [row["step"] for row in rows(tmp_path)] == [0, 5, 10]
    assert rows(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("line", ["", "{", "[]", '{"step": 1}', '{"step": 1, "tokens": "2"}', "\xff"])
def test_a_broken_line_is_an_error_that_names_the_file_and_the_line(tmp_path, line):
    good = '{"step": 1, "tokens": 10}\n'
    (tmp_path / "metrics.jsonl").write_bytes(f"{good}{line}\n{good}".encode("latin-1"))
    with pytest.raises(UserError, match=f"{tmp_path / 'metrics.jsonl'} is damaged: line 2"):
        rows(tmp_path)

import codecs

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simbal.errors import UserError

LINE = st.text(st.characters(codec="utf-8", exclude_characters="\n")).filter(lambda text: text.encode().strip())
PARAGRAPH = st.lists(LINE.map(lambda text: text.rstrip("\r")), min_size=1).map("\n".join)


def test_a_document_is_the_file_or_each_run_of_lines_without_a_blank_one(texts):
    content = b"\n\none\ntwo\n \t\n\nthree\n"
    assert texts("a.txt", content)[0] == [content.decode()]
    assert texts("a.txt", content, txt_split="blank_lines")[0] == ["one\ntwo", "three"]


def test_windows_line_ends_and_a_mark_are_fine(texts):
    content = codecs.BOM_UTF8 + b"one\r\ntwo\r\n\r\nthree\r\n"
    assert texts("a.txt", content, txt_split="blank_lines")[0] == ["one\r\ntwo", "three"]
    assert texts("a.txt", codecs.BOM_UTF8 + b"\none", txt_split="blank_lines")[0] == ["one"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paragraphs=st.lists(PARAGRAPH, min_size=1))
def test_any_paragraphs_come_back(texts, paragraphs):
    content = "\n\n".join(paragraphs).encode()
    if not content.startswith(codecs.BOM_UTF8):
        assert texts("a.txt", content, txt_split="blank_lines")[0] == paragraphs


def test_text_in_another_encoding_stops_with_the_byte_in_the_file(texts):
    with pytest.raises(UserError, match="a.txt, byte 8: not utf-8: set data.encoding .latin-1.. or convert the file"):
        texts("a.txt", b"one\n\ncaf\xe9\n\n", txt_split="blank_lines")
    with pytest.raises(UserError, match="a.txt: data.encoding=utf-16 needs data.txt_split=file"):
        texts("a.txt", "one".encode("utf-16"), txt_split="blank_lines", encoding="utf-16")


def test_a_file_of_blank_lines_holds_no_text(texts):
    with pytest.raises(UserError, match="a.txt: the file is empty or holds no text"):
        texts("a.txt", b"\n \n", txt_split="blank_lines")

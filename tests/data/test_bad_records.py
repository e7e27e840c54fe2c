import pytest

from simbal.errors import UserError

GOOD = b'{"text": "a text"}\n'
BAD = {
    b"no json": "not JSON",
    b"[1]": "no JSON object",
    b"{}": "no text key",
    b'{"text": null}': "null as text",
    b'{"text": 1}': "int as text",
    b'{"text": "caf\xe9"}': "not utf-8",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=BAD.values())
def test_one_bad_record_in_a_thousand_is_left_out_and_counted(texts, line, reason):
    found, skipped = texts("a.jsonl", GOOD * 500 + line + b"\n" + GOOD * 499, on_bad_record="skip")
    assert (len(found), skipped) == (999, {f"bad record: {reason}": 1})


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=BAD.values())
def test_one_in_fewer_stops_at_the_end_with_the_place_of_the_first(texts, line, reason):
    sentence = r"a.jsonl, line 501: .*; it is the first of 1 bad records among 999, and data.on_bad_record=skip leaves"
    with pytest.raises(UserError, match=sentence):
        texts("a.jsonl", GOOD * 500 + line + b"\n" + GOOD * 498, on_bad_record="skip")


def test_records_of_all_kinds_are_counted_together(texts):
    content = b"\n" + b"no json\n" + b"{}\n" + GOOD * 1998
    assert texts("a.jsonl", content, on_bad_record="skip")[1] == {
        "bad record: not JSON": 1,
        "bad record: no text key": 1,
    }
    with pytest.raises(UserError, match="a.jsonl, line 2: this is not JSON .* first of 3 bad records among 2001"):
        texts("a.jsonl", content + b"1\n", on_bad_record="skip")


def test_without_skip_the_first_bad_record_stops_at_once(texts):
    with pytest.raises(UserError, match="a.jsonl, line 2: this is not JSON .*[)]$"):
        texts("a.jsonl", GOOD + b"?\n" + GOOD * 5000)

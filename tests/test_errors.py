"""No secret of a URL survives, and what is no secret stays as it was."""

import re
import string
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simbal.errors import UserError, redacted

SPECIAL = "/@:%?#&'\"\\ ;$ü"
# long enough to be no part of the rest by chance
PASSWORDS = st.text(st.sampled_from(string.ascii_letters + string.digits + SPECIAL), min_size=8, max_size=40)
HOSTS = st.sampled_from(["host", "127.0.0.1:5432", "[::1]:80", "db.example.org"])
AROUND = st.sampled_from(["", "cannot reach ", "storage=", "'", "a sentence: "])


def parts(password: str) -> list[str]:
    """The runs of letters and digits in it that are long enough to be told from others."""
    return [part for part in re.split(r"[^A-Za-z0-9]+", password) if len(part) >= 6]


@given(PASSWORDS, HOSTS, AROUND)
def test_a_percent_encoded_password_survives_in_no_form(password, host, around):
    written = quote(password, safe="")
    shown = redacted(f"{around}postgresql+psycopg2://ada:{written}@{host}/db?sslmode=require")
    for form in (password, written, quote(password), quote_plus(password), *parts(password), *parts(written)):
        assert form not in shown
    assert shown.startswith(f"{around}postgresql+psycopg2://***@{host}/db?sslmode=***")


@given(PASSWORDS, HOSTS)
def test_a_password_in_the_query_survives_in_no_form(password, host):
    for key in ("password", "sslpassword", "access_token", "X-Amz-Signature", "api_key"):
        shown = redacted(f"https://{host}/db?a=1&{key}={quote(password, safe='')}&b=2")
        assert not any(part in shown for part in [quote(password, safe=""), *parts(quote(password, safe=""))])
        assert f"&{key}=***&b=***" in shown


@given(PASSWORDS)
def test_a_password_with_signs_that_a_url_should_not_have_leaves_nothing(password):
    assume("@" not in password)  # which ends it, by all that can be seen
    assume(not re.match(r"\d{1,5}(?:[/?#\s]|$)", password))  # a port
    shown = redacted(f"postgresql://ada:{password}@host/db")
    assert not any(part in shown for part in [password, *parts(password)])


@given(st.text())
def test_what_is_redacted_stays_as_it_is(text):
    for given_text in (text, f"http://{text}", f"x://a:{text}@h/?k={text}"):
        assert redacted(redacted(given_text)) == redacted(given_text)


@given(st.text().filter(lambda text: "://" not in text))
def test_a_text_without_a_url_is_untouched(text):
    assert redacted(text) == text


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/o/n@rev/x", "http://host:8080/a@1/x", "s3://b/k@x", "https://[::1]:80/a@b", "sqlite:///a@b/c.db",
        "https://${oc.env:USER}:${oc.env:TOKEN}@host/x", "https://host/x?token=${oc.env:TOKEN}", "http://host/?a",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(url):
    assert redacted(url) == url


def test_two_urls_that_ask_for_different_data_stay_different():
    assert redacted("http://host/x?page=1") != redacted("http://host/x?page=2")


def test_every_url_of_a_line_is_redacted():
    shown = redacted("from http://a:b1secret@h/x to http://c:d1secret@h/y?token=e1secret and on")
    assert "secret" not in shown


def test_a_sentence_for_a_user_holds_no_secret():
    assert str(UserError("cannot open http://ada:secret@host/x")) == "cannot open http://***@host/x"

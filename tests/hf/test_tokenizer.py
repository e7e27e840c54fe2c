"""The exported tokenizer gives the token ids of training."""

import random

import pytest
from transformers import AutoTokenizer

from simbal.config.schema import CL100K_IDS
from simbal.data.tokenizer import load_tokenizer
from simbal.hf.export import END_OF_TEXT, write_tokenizer

PIECES = [
    "a", "'s", "'LL", "\u017f", "'\u017f", "\u212a", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028",
    "\x85", "1", "123", "\u0663", "\u00b2", "\u00bd", "\u00e9", "\u00df", "\u6587\u5b57", "\U0001f469\u200d\U0001f467",
    "!", "====", "####", "\n\n\n   ", "</", END_OF_TEXT, "<|unused_100256|>", "x_y", "Don't", "\u0301", "\x00",
    "\ufeff", "\u0130", " the", "ing", "\x0b", "\x1c",
]  # fmt: skip


@pytest.fixture(scope="module", params=(4096, pytest.param(CL100K_IDS, marks=pytest.mark.slow)))
def both(request, tmp_path_factory):
    ours = load_tokenizer(request.param)
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(ours, 16, folder)
    return ours, AutoTokenizer.from_pretrained(folder)


def ids(ours, text: str) -> list[int]:
    return ours.encode(text.encode()).tolist()


def test_ids_agree_on_pieces_in_any_order_and_decode_to_the_text(both):
    ours, theirs = both
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choice(PIECES) for _ in range(generator.randint(1, 30)))
        assert theirs(text).input_ids == ids(ours, text)
        assert theirs.decode(ids(ours, text)) == text


def test_ids_agree_on_every_character_of_the_first_plane(both):
    ours, theirs = both
    for start in range(0, 0x10000, 1024):
        text = "".join(f"a{chr(c)}1{chr(c)}{chr(c)} b" for c in range(start, start + 1024) if not 0xD800 <= c < 0xE000)
        assert theirs(text).input_ids == ids(ours, text)


def test_end_of_text_has_its_id_and_is_never_added_or_parsed(both):
    ours, theirs = both
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eot, ours.eot)
    assert theirs.convert_tokens_to_ids(END_OF_TEXT) == ours.eot
    assert theirs.model_max_length == 16
    assert ours.eot not in theirs(f"one{END_OF_TEXT}two").input_ids
    assert theirs("").input_ids == []
    assert theirs.decode([ours.eot]) == END_OF_TEXT
    assert len(theirs) == ours.eot + 1

"""Documents are encoded by threads, and no more of them wait than memory can hold."""

from simbal.data import builder as encode
from simbal.data.builder import Encoders
from simbal.data.document import Document
from simbal.data.sources.synthetic import Symbols


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

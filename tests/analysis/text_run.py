"""A small run on text."""

from pathlib import Path

from simbal.runs.spec import RunSpec
from tests.conftest import spec_of


def text_spec(folder: Path, *overrides: str) -> RunSpec:
    """Return the spec of a run on made-up words, with its text and cache in `folder`."""
    words = ["one", "two", "three", "four", "five"]
    texts = [" ".join(words[(a * b) % 5] for b in range(60)) for a in range(1, 40)]
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    data = (
        "data=files", f"data.files={folder / 'corpus.txt'}", "data.txt_split=blank_lines", "data.vocab_size=400",
        "data.seq_len=16", "data.validation_one_in=5", "data.validation_tokens=64",
    )  # fmt: skip
    return spec_of(folder / "outputs", folder / "cache", *data, *overrides)

"""A run on text, small enough to train in a second."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from simbal.runs.spec import RunSpec
from tests.conftest import CONF, SMALL


def text_spec(folder: Path, *overrides: str) -> RunSpec:
    """A spec of a run on made-up words; everything is in `folder`."""
    words = ["one", "two", "three", "four", "five"]
    texts = [" ".join(words[(a * b) % 5] for b in range(60)) for a in range(1, 40)]
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    data = (
        "data=files", f"data.files={folder / 'corpus.txt'}", "data.txt_split=blank_lines", "data.vocab_size=400",
        "data.seq_len=16", "data.validation_one_in=5", "data.validation_tokens=64",
        f"data.cache_dir={folder / 'cache'}", f"output_dir={folder / 'outputs'}",
    )  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", [*SMALL, *data, *overrides], return_hydra_config=True))

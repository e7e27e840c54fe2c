"""The sources `pysource` (the published corpus, and the files read from a package) and `synthetic`."""

import base64
import json
import math
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simbal.data.prepare import prepare
from simbal.data.sources import PySource
from simbal.errors import UserError

PUBLISHED = json.loads(Path(__file__).with_name("pysource.json").read_text())
SOURCE = b"print('a file that is long enough to be kept in the corpus, 64 bytes')\n"
SYMBOLS, BRANCHING = 31, 4


@pytest.mark.slow
def test_the_default_corpus_is_the_published_one(tmp_path, load_keys):
    corpus = prepare(load_keys("pysource", tmp_path, vocab_size=PUBLISHED["vocab_size"]), False)
    assert corpus.fingerprints == {"text": PUBLISHED["text_fingerprint"], "tokens": PUBLISHED["tokens_fingerprint"]}
    documents = {}
    for split, published in PUBLISHED["splits"].items():
        counts = corpus.meta["splits"][split]
        assert published.items() <= (counts | {"sha256": corpus.meta["files"][f"{split}/tokens.bin"]}).items()
        tokens, ends = corpus.tokens(split), corpus.document_ends(split)
        assert (len(tokens), len(ends), int(ends[-1])) == (counts["tokens"], counts["documents"], len(tokens))
        assert np.array_equal(np.flatnonzero(tokens == corpus.meta["eot"]), ends.astype(np.int64) - 1)
        assert int(corpus.byte_len[tokens].sum()) == counts["bytes"]
        documents[split] = {tokens[a:b].tobytes() for a, b in pairwise([0, *ends.tolist()])}
    assert not documents["train"] & documents["validation"]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install({"toy/a.py": b"..."})`: a package `toy` 1.0 with a RECORD of these files."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(files):
        info = tmp_path / "toy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        rows = []
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
            digest = base64.urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(content)}\n")
        (info / "RECORD").write_text("".join(rows))
        return info

    return write


def read(expected="1.0", strict=False):
    source = PySource({"toy": expected}, strict, 50)
    source.identity()
    skipped = Counter()
    return [document.content for document in source.read(*source.inputs(), skipped)], +skipped


def test_tests_vendored_code_small_files_and_duplicates_are_skipped(install):
    install({
        "toy/a.py": SOURCE, "toy/copy.py": SOURCE, "toy/b.py": SOURCE * 2, "toy/small.py": b"1\n",
        "toy/tests/c.py": SOURCE * 3, "toy/_vendor/x/d.py": SOURCE * 4, "toy/data.txt": SOURCE * 5,
    })  # fmt: skip
    contents, skipped = read()
    assert contents == sorted([SOURCE, SOURCE * 2], key=lambda content: sha256(content).digest())
    assert skipped == {"tests or vendored code": 2, "under 64 bytes": 1, "duplicate": 1}


def test_another_version_changed_files_and_missing_packages_are_refused(install):
    info = install({"toy/a.py": SOURCE})
    before = PySource({"toy": "1.0"}, False, 50).identity()
    with pytest.raises(UserError, match="needs toy==2.0, not 1.0: pip install toy==2.0"):
        read(expected="2.0", strict=True)
    (info.parent / "toy/a.py").write_bytes(SOURCE * 2)
    with pytest.raises(UserError, match="toy/a.py of toy .*RECORD.* pip install --force-reinstall"):
        read()
    with pytest.raises(UserError, match="absent, which is not installed: pip install absent==1.0"):
        PySource({"absent": "1.0"}, False, 50).identity()
    (info / "RECORD").write_text("toy/a.py,sha256=other,70\n")
    assert PySource({"toy": "1.0"}, False, 50).identity() != before, "a reinstalled package is another corpus"


@pytest.fixture
def chain(keys):
    """`chain(chain_seed=1)`: documents of 500 symbols, one row each, without their end of text."""

    def walk(split="train", **changed):
        documents = {"vocab_size": SYMBOLS + 1, "branching": BRANCHING, "documents": 100, "document_tokens": 500}
        store = prepare(keys("synthetic", **{**documents, **changed}), progress=False)
        return store.tokens(split).reshape(-1, 501)[:, :-1].astype(int)

    return walk


def transitions(symbols):
    counts = np.zeros((SYMBOLS, SYMBOLS))
    np.add.at(counts, (symbols[:, :-1].ravel(), symbols[:, 1:].ravel()), 1)
    return counts


def test_a_chain_has_the_given_branching_and_the_entropy_of_its_logarithm(chain):
    counts = transitions(chain())
    assert set(np.count_nonzero(counts[counts.sum(1) > 100], axis=1)) == {BRANCHING}
    assert not transitions(chain("validation"))[counts == 0].any()
    rows = counts / counts.sum(1, keepdims=True)
    nats = -(counts * np.log(rows, where=rows > 0, out=np.zeros_like(rows))).sum() / counts.sum()
    assert nats == pytest.approx(math.log(BRANCHING), abs=2e-3)


def test_a_synthetic_document_depends_on_the_seed_and_its_number_only(chain):
    assert np.array_equal(chain(documents=40), chain()[:40])
    assert not np.array_equal(chain(chain_seed=1), chain())
    train, validation = ({row.tobytes() for row in chain(split)} for split in ("train", "validation"))
    assert (len(train), len(validation), train & validation) == (100, 2, set())

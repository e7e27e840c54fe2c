import base64
import json
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simbal.data.sources.pysource import PySource
from simbal.data.store import prepare
from simbal.errors import UserError

PUBLISHED = json.loads(Path(__file__).with_name("pysource.json").read_text())
SOURCE = b"print('a file that is long enough to be kept in the corpus, 64 bytes')\n"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, load_keys):
    """The published corpus, built once: some seconds of two cores."""
    return prepare(load_keys("pysource", tmp_path_factory.mktemp("cache"), vocab_size=PUBLISHED["vocab_size"]), False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install({"toy/a.py": b"..."})`: a package `toy` 1.0 on the path, with a RECORD of these files."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(files, record=True, editable=False):
        info = tmp_path / "toy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        rows = []
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
            digest = base64.urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(content)}\n")
        if record:
            (info / "RECORD").write_text("".join(rows))
        if editable:
            (info / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///toy"}')
        return info

    return write


def read(reference="1.0", strict=False):
    source = PySource({"toy": reference}, strict, 50)
    source.identity()
    skipped = Counter()
    return [document.content for document in source.read(*source.units(), skipped)], skipped


@pytest.mark.slow
def test_the_corpus_is_the_published_one(corpus):
    assert corpus.fingerprints == {"text": PUBLISHED["text_fingerprint"], "tokens": PUBLISHED["tokens_fingerprint"]}
    for split, published in PUBLISHED["splits"].items():
        found = corpus.meta["splits"][split] | {"sha256": corpus.meta["files"][f"{split}/tokens.bin"]}
        assert published.items() <= found.items()


@pytest.mark.slow
def test_the_files_hold_what_their_description_says(corpus):
    for split, counts in corpus.meta["splits"].items():
        tokens, ends = corpus.tokens(split), corpus.document_ends(split)
        assert (len(tokens), len(ends), int(ends[-1])) == (counts["tokens"], counts["documents"], len(tokens))
        assert np.array_equal(np.flatnonzero(tokens == corpus.meta["eot"]), ends.astype(np.int64) - 1)


@pytest.mark.slow
def test_bytes_of_the_tokens_sum_to_the_bytes_of_the_text(corpus):
    for split, counts in PUBLISHED["splits"].items():
        assert int(corpus.byte_len[corpus.tokens(split)].sum()) == counts["bytes"]


@pytest.mark.slow
def test_no_document_is_in_both_splits(corpus):
    def texts(split):
        starts = [0, *corpus.document_ends(split).tolist()]
        tokens = corpus.tokens(split)
        return {tokens[a:b].tobytes() for a, b in pairwise(starts)}

    assert not texts("train") & texts("validation")


def test_tests_vendored_code_small_files_and_duplicates_are_left_out(install):
    install({
        "toy/a.py": SOURCE, "toy/copy.py": SOURCE, "toy/b.py": SOURCE * 2, "toy/small.py": b"1\n",
        "toy/tests/c.py": SOURCE * 3, "toy/_vendor/x/d.py": SOURCE * 4, "toy/data.txt": SOURCE * 5,
    })  # fmt: skip
    contents, skipped = read()
    assert sorted(contents) == [SOURCE, SOURCE * 2]
    assert skipped == {"tests or vendored code": 2, "under 64 bytes": 1, "duplicate": 1}


def test_documents_come_in_the_order_of_their_sha256(install):
    install({f"toy/{n}.py": SOURCE * n for n in range(1, 9)})
    digests = [sha256(content).hexdigest() for content in read()[0]]
    assert digests == sorted(digests)


def test_another_version_stops_a_strict_config(install):
    install({"toy/a.py": SOURCE})
    with pytest.raises(UserError, match="needs toy==2.0, but 1.0 is installed: pip install toy==2.0"):
        read(reference="2.0", strict=True)


def test_a_changed_file_stops(install):
    info = install({"toy/a.py": SOURCE})
    (info.parent / "toy/a.py").write_bytes(SOURCE * 2)
    with pytest.raises(UserError, match="toy/a.py of toy .*RECORD.* pip install --force-reinstall"):
        read()


def test_a_reinstalled_package_is_another_corpus(install):
    info = install({"toy/a.py": SOURCE})
    before = PySource({"toy": "1.0"}, False, 50).identity()
    (info / "RECORD").write_text("toy/a.py,sha256=other,70\n")
    assert PySource({"toy": "1.0"}, False, 50).identity() != before

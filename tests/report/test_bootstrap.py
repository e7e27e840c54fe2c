"""The interval over documents equals scipy's paired bootstrap, for arms measured on the same documents."""

import csv
import json
import math

import numpy as np
import pytest
import scipy.stats

from simbal.report import sections
from simbal.report.bootstrap import bootstrap, document_differences
from simbal.report.collect import collect
from simbal.report.report import report
from simbal.report.table import build
from simbal.runs.curves import DocumentSums

TOKENS = [int(count) for count in np.random.default_rng(1).integers(20, 400, 40)]


def sums(seed, loss):
    """Documents with realistic losses: most of the variation is between documents, little between seeds."""
    own, of_seed = np.random.default_rng(2).normal(0, 0.5, 40), np.random.default_rng(seed).normal(0, 0.05, 40)
    return DocumentSums([(loss + x) * count for x, count in zip(own + of_seed, TOKENS, strict=True)], TOKENS)


def test_the_interval_equals_scipys_paired_bootstrap():
    treatment, baseline = [sums(seed, 3.95) for seed in (10, 11)], [sums(seed, 4.0) for seed in (20, 21)]
    (found,) = bootstrap([document_differences(treatment, baseline)])

    def difference(places):
        counts = np.array(TOKENS)[places]
        losses = [[np.array(run.nats)[places].sum(-1) / counts.sum(-1) for run in arm] for arm in (treatment, baseline)]
        return np.mean(losses[0], axis=0) - np.mean(losses[1], axis=0)

    theirs = scipy.stats.bootstrap(
        (np.arange(40),), lambda places, axis: difference(places), method="percentile", rng=np.random.default_rng(3)
    )
    assert found.error == pytest.approx(theirs.standard_error, rel=0.05)
    assert (found.low, found.high) == pytest.approx(theirs.confidence_interval, abs=0.1 * found.error)
    assert found.documents == 40


def test_an_equal_difference_in_every_token_has_no_spread():
    shifted = DocumentSums([nats - 0.25 * count for nats, count in zip(sums(1, 4.0).nats, TOKENS, strict=True)], TOKENS)
    (found,) = bootstrap([document_differences([shifted], [sums(1, 4.0)])])
    assert (found.low, found.high, found.error) == pytest.approx((-0.25, -0.25, 0))


def test_documents_without_tokens_are_left_out():
    found = document_differences([DocumentSums([3.0, 0.0, 8.0], [1, 0, 2])], [DocumentSums([2.0, 0.0, 9.0], [1, 0, 2])])
    assert (found.nats, found.tokens) == ([1.0, -1.0], (1, 2))


@pytest.mark.parametrize(
    ("treatment", "baseline"),
    [
        ([None], [DocumentSums([1.0, 2.0], [1, 1])]),
        ([DocumentSums([1.0, 2.0], [1, 1]), None], [DocumentSums([1.0, 2.0], [1, 1])] * 2),
        ([DocumentSums([1.0, 2.0], [1, 1])], [DocumentSums([1.0, 2.0], [1, 2])]),
        ([DocumentSums([1.0, 0.0], [1, 0])], [DocumentSums([1.0, 0.0], [1, 0])]),
        ([], []),
    ],
)
def test_missing_or_different_or_single_documents_give_no_interval(treatment, baseline):
    assert document_differences(treatment, baseline) is None


def test_table_and_files_have_the_interval_for_losses_and_perplexities(write_run):
    for name, loss in (("lbl", 4.0), ("simbal", 3.95)):
        for seed in range(3):
            run = write_run(name, seed, metrics={"val/ppl": math.exp(loss + seed / 100), "val/bpb": loss / 3})
            found = sums(seed + 100 * (name == "lbl"), loss)
            kept = {"nats": found.nats, "tokens": found.tokens, "bytes": found.tokens}
            (run / "documents.json").write_text(json.dumps(kept))
    folder = run.parent
    report(folder)
    lines = [*csv.DictReader((folder / "table.csv").read_text().splitlines())]
    (line,) = [line for line in lines if line["documents"]]
    kept = json.loads((folder / "table.json").read_text())["arms"][1]["differences"]["val/ppl"]["over_documents"]
    assert float(line["documents_low"]) == kept["low"] < -0.05 < kept["high"]
    assert (line["metric"], line["documents"], float(line["documents_error"])) == ("val/ppl", "40", kept["error"])
    next(folder.glob("simbal-*seed1-*/documents.json")).unlink()
    assert "over documents" not in sections.differences(build("t", collect(folder))).headings

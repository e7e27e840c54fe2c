"""When and on what a run validates: along the way on drawn windows, at its end on the whole validation split."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.quality import document_sums
from simbal.analysis.trained import load
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.run import train
from simbal.training.validation import is_validated, next_validation
from tests.analysis.text_run import text_spec
from tests.training.run_files import rows


@given(st.integers(0, 10**6), st.integers(1, 5000), st.sampled_from(["log", "none"]))
def test_the_next_validation_is_the_first_later_step_that_is_validated(step, every, at):
    following = next_validation(step, every, at)
    between = range(step + 1, following)
    assert step < following <= (step // every + 1) * every
    assert not any(s % every == 0 or (at == "log" and s < every and s & (s - 1) == 0) for s in between)
    assert following % every == 0 or (at == "log" and following < every and following & (following - 1) == 0)
    assert is_validated(following, every, at)


def test_early_validations_are_spaced_by_doubling(small_spec):
    spec = small_spec("trainer.val_at=log", "trainer.val_every=10", "trainer.micro_batch=4")
    train(spec)
    assert [row["step"] for row in rows(spec) if "val/loss" in row] == [0, 1, 2, 4, 8, 10, 12]


def test_the_record_is_of_the_whole_split_and_the_curve_of_what_was_drawn(small_spec):
    part, whole = (small_spec(f"data.validation_tokens={tokens}") for tokens in (64, "null"))
    for spec in (part, whole):
        train(spec)
    first, second = (RunFolder(spec.path).read_record() for spec in (part, whole))
    assert first["metrics"] == second["metrics"]
    last_of_curve = [row["val/loss"] for row in rows(part) if "val/loss" in row][-1]
    assert last_of_curve != first["metrics"]["val/loss"]
    assert [row["val/loss"] for row in rows(whole) if "val/loss" in row][-1] == second["metrics"]["val/loss"]


def test_a_run_validates_on_the_first_tokens_of_each_document_where_its_data_say_so(small_spec):
    keys = [f"data.validation_document_tokens={tokens}" for tokens in (32, "null")]
    part, whole = (small_spec(key, "trainer.max_steps=1") for key in keys)
    for spec in (part, whole):
        train(spec)
    few, all_of_it = (json.loads((spec.path / "documents.json").read_text())["tokens"] for spec in (part, whole))
    assert sum(few) < sum(all_of_it)
    assert len(few) == len(all_of_it)


def test_documents_json_is_what_the_analysis_finds_and_sums_to_the_record(tmp_path):
    spec = text_spec(tmp_path)
    train(spec)
    written = json.loads((spec.path / "documents.json").read_text())
    trained = load(spec.path, "cpu")
    nats, tokens, num_bytes = document_sums(trained, None, 8).T.tolist()
    seen = [place for place, count in enumerate(written["tokens"]) if count]
    assert len(seen) > 3
    assert [written["nats"][place] for place in seen] == pytest.approx(nats, rel=1e-5)
    assert [written["tokens"][place] for place in seen] == tokens
    assert [written["bytes"][place] for place in seen] == num_bytes
    loss = math.fsum(written["nats"]) / sum(written["tokens"])
    assert loss == pytest.approx(trained.record["metrics"]["val/loss"], rel=1e-12)


def test_damaged_documents_are_noticed_as_damaged_curves_are(small_spec):
    spec = small_spec()
    train(spec)
    file = spec.path / "documents.json"
    file.write_text(file.read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match=r"documents.json does not match"):
        RunFolder(spec.path).read_record()


def test_a_seed_of_the_data_decides_order_and_windows_and_no_weight(small_spec):
    """The seeds of weights and of the order can be crossed; without data.seed, the one is the other's."""
    alike, crossed = small_spec("seed=3", "data.seed=3"), small_spec("seed=3", "data.seed=4")
    plain = small_spec("seed=3")
    for spec in (alike, crossed, plain):
        train(spec)
    first = [[row["val/loss"] for row in rows(spec) if "val/loss" in row] for spec in (alike, crossed, plain)]
    assert first[0] == first[2] != first[1]

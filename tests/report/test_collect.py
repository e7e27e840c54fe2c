"""Runs, analyses and models are read with their definitions; damaged and incomparable runs are named."""

import json

import pytest

from simbal.analysis.result import require_same_model, write_analysis, write_model
from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.report.columns import choose_columns
from simbal.report.notes import notes
from simbal.report.render import as_json, tidy_rows
from simbal.report.report import parse_keys, read_table
from simbal.report.sections import absent, means
from simbal.report.table import build

FACTS = {
    "digests": {"config": "c" * 64, "weights": "d" * 64}, "tokenizer": "e" * 64, "context": 2048, "dtype": "bfloat16",
    "data": {"source": "pysource", "text": "a" * 64, "tokens": "b" * 64}, "document_tokens": 2048,
    "seed": 0, "source": "allenai/OLMoE-1B-7B-0924",
}  # fmt: skip
DATA = {"source": "synthetic", "text": "a", "tokens": "y", "versions": {"numpy": "2.0"}}


def analyze(run, name, metrics, **settings):
    content = {"settings": settings, "definition": {"min_pes": "least similarity"}, "metrics": metrics}
    write_analysis(run / "analysis" / f"{name}.json", content)


def test_a_missing_or_empty_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=f"no folder {tmp_path / 'nowhere'}"):
        collect(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"{tmp_path} contains no runs"):
        collect(tmp_path)


def test_runs_without_a_result_are_shown_with_their_errors_and_count_for_nothing(write_run):
    write_run(seed=0)
    write_run(seed=1, status="diverged", error="the gradient was NaN", step=17)
    path = write_run(seed=2)
    (path / "record.json").write_bytes((path / "record.json").read_bytes()[:-9])
    write_run(seed=3, status=None)
    (path.parent / "sweep.json").write_text(json.dumps({"command": "", "runs": {path.name: "seed=2", "new": "seed=4"}}))
    table = read_table(path.parent)
    assert [run.seed for row in table.rows for run in row.arm.runs] == [0]
    lines = absent(table).lines
    assert [line[1] for line in lines] == ["diverged", "damaged", "unfinished", "missing"]
    assert lines[0][2] == "diverged at step 17: the gradient was NaN"
    assert f"{path / 'record.json'} is damaged" in lines[1][2]
    assert [run["seed"] for run in as_json(table)["without_result"]] == [1, 2, 3]
    assert as_json(table)["missing"] == [{"run": "seed=4", "folder": "new"}]


def test_a_copied_run_does_not_count_twice(write_run):
    path = write_run()
    path.rename(path.with_name("original"))
    write_run()
    with pytest.raises(UserError, match="are copies of the same run"):
        collect(path.parent)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data": DATA | {"versions": {"numpy": "2.1"}}}, "data.versions.numpy is '2.0' in the first and '2.1' in the"),
        ({"data": DATA}, "data.tokens is 'b' in the first and 'y'"),
        ({"definitions": {"val/ppl": "2 to the loss"}}, "definitions.val/ppl is 'exp of the loss' in the first and"),
        ({"steps": 1600}, "the first was trained for 400 steps and the second for 1,600"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_with_the_reason(write_run, fields, reason):
    write_run(seed=0)
    with pytest.raises(UserError, match=f"cannot be compared: {reason}.*name="):
        collect(write_run(seed=1, **fields).parent)


@pytest.fixture
def analyzed(write_run):
    """A folder of two arms; only lbl has an analysis."""
    analyze(write_run("lbl", 0), "redundancy", {"min_pes": 0.25, "ppl": 3.0})
    return write_run("simbal", 0).parent


def chosen(folder, *columns):
    return [metric.key for metric in choose_columns(columns, collect(folder))]


def test_a_column_is_a_key_or_its_last_part_and_the_runs_own_number_comes_first(analyzed):
    assert chosen(analyzed, "ppl", "min_pes", "redundancy.ppl") == ["val/ppl", "redundancy.min_pes", "redundancy.ppl"]


def test_a_missing_analysis_is_a_dash_and_its_definition_is_a_note(analyzed):
    table = read_table(analyzed, columns=["min_pes"])
    assert [line[-1] for line in means(table).lines] == ["0.25", "—"]
    assert "redundancy.min_pes: least similarity." in notes(table)


def test_unknown_and_ambiguous_columns_and_different_settings_are_refused(analyzed):
    with pytest.raises(UserError, match="columns: no run has min_pez.*redundancy.min_pes"):
        chosen(analyzed, "min_pez")
    analyze(next(analyzed.glob("lbl-*")), "other", {"min_pes": 1.0})
    with pytest.raises(UserError, match="columns: min_pes may be other.min_pes or redundancy.min_pes"):
        chosen(analyzed, "min_pes")
    analyze(next(analyzed.glob("simbal-*")), "redundancy", {"min_pes": 0.5}, tokens=7)
    with pytest.raises(UserError, match="analysis redundancy has different settings"):
        chosen(analyzed, "redundancy.min_pes")


def test_default_columns_are_those_with_a_number(write_run):
    dense = {"val/ppl": 9.0, "val/max_vio": None, "val/min_pes": None}
    folder = write_run("none", 0, metrics=dense).parent
    assert [metric.key for metric in build("t", collect(folder)).metrics] == ["val/ppl", "tokens_per_second"]
    write_run("lbl", 0, metrics=dense | {"val/min_pes": 0.25})
    table = build("t", collect(folder))
    assert [metric.heading for metric in table.metrics] == ["perplexity ↓", "min PES ↓", "tokens/s ↑"]


def test_the_runs_own_columns_are_used_if_all_runs_name_the_same(write_run):
    folder = write_run("lbl", 0, keys={"columns": ["max_vio", "ppl"]}).parent
    write_run("simbal", 1, keys={"columns": None}, status="failed")
    assert [metric.key for metric in read_table(folder).metrics] == ["val/max_vio", "val/ppl"]
    assert [metric.key for metric in read_table(folder, columns=["ppl"]).metrics] == ["val/ppl"]
    write_run("simbal", 2, keys={"columns": ["ppl"]})
    assert [metric.key for metric in read_table(folder).metrics] == ["val/ppl", "val/max_vio", "tokens_per_second"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("colums=[ppl]", ("colums", "columns")),
        ("compare=both", ("compare=both", "all")),
        ("equivalence_margin=-1", ("equivalence_margin=-1", "greater than 0")),
        ("columns=ppl", ("columns",)),
        ("nowhere", ("nowhere", "folder")),
    ],
)
def test_a_wrong_key_or_value_is_named_with_an_alternative(argument, words):
    with pytest.raises(UserError) as error:
        parse_keys([argument])
    assert all(word in str(error.value) for word in words)


def test_keys_are_parsed_as_yaml():
    found = parse_keys(["columns=[ppl,min_pes]", "paper=true", "equivalence_margin=1e-2", "baseline=simbal coef=0.1"])
    assert (found["columns"], found["paper"], found["equivalence_margin"]) == (["ppl", "min_pes"], True, 0.01)
    assert found["baseline"] == "simbal coef=0.1"


@pytest.fixture
def models(tmp_path):
    """outputs/zoo with two measured Hugging Face models; only one has PES."""
    zoo = tmp_path / "outputs" / "zoo"
    for name in ("OLMoE", "Qwen3-MoE"):
        write_model(zoo / name, FACTS)
    analyze(zoo / "OLMoE", "quality", {"bpb": 0.75})
    analyze(zoo / "OLMoE", "redundancy", {"min_pes": 0.125})
    analyze(zoo / "Qwen3-MoE", "quality", {"bpb": 0.5})
    return zoo


def test_a_folder_of_measured_models_has_a_table(models):
    found = " ".join(notes(read_table(models)))
    assert "OLMoE: allenai/OLMoE-1B-7B-0924, data pysource, tokens bbbbbbbbbbbb" in found
    assert "compare bits per byte" in found
    section = means(read_table(models))
    assert section.headings == ["model", "n", "seeds", "quality.bpb ↓", "redundancy.min_pes ↓"]
    assert section.lines == [["OLMoE", "1", "—", "0.75", "0.125"], ["Qwen3-MoE", "1", "—", "0.5", "—"]]
    table = read_table(models, columns=["min_pes"])
    assert [*tidy_rows(table)] == [{"model": "OLMoE", "metric": "redundancy.min_pes", "mean": 0.125, "n": 1}]
    (first, _) = as_json(read_table(models))["models"]
    assert first["values"] == {"quality.bpb": 0.75, "redundancy.min_pes": 0.125}
    assert first["digests"] == FACTS["digests"]


def test_another_model_does_not_go_into_the_same_folder(models):
    require_same_model(models / "OLMoE", FACTS)
    with pytest.raises(UserError, match="digests"):
        require_same_model(models / "OLMoE", FACTS | {"digests": {"config": "c" * 64, "weights": "0" * 64}})

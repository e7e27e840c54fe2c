"""A table of models of Hugging Face that evaluate.py has measured, alone or beside runs."""

import json

import pytest

from simbal.analysis.result import read_model, require_same_model, write_analysis, write_model
from simbal.errors import UserError
from simbal.report.export import as_json, tidy_rows
from simbal.report.report import read_table, report
from simbal.report.sections import means

FACTS = {
    "digests": {"config": "c" * 64, "weights": "d" * 64}, "tokenizer": "e" * 64, "context": 2048, "dtype": "bfloat16",
    "data": {"source": "pysource", "text": "a" * 64, "tokens": "b" * 64}, "document_tokens": 2048,
    "seed": 0, "source": "allenai/OLMoE-1B-7B-0924",
}  # fmt: skip
DEFINITION = {"bpb": "bits by bytes", "min_pes": "smallest PES"}


@pytest.fixture
def folder(tmp_path):
    """outputs/zoo with two models, of which one has no PES."""
    zoo = tmp_path / "outputs" / "zoo"
    for name, metrics in (
        ("OLMoE", {"quality": {"bpb": 0.75}, "redundancy": {"min_pes": 0.125}}),
        ("Qwen3-MoE", {"quality": {"bpb": 0.5}}),
    ):
        write_model(zoo / name, FACTS)
        for analysis, numbers in metrics.items():
            content = {"settings": {}, "definition": DEFINITION, "metrics": numbers}
            write_analysis(zoo / name / "analysis" / f"{analysis}.json", content)
    return zoo


def test_a_folder_of_models_alone_has_a_table(folder, capsys):
    report(folder)
    out = capsys.readouterr().out
    assert "OLMoE: allenai/OLMoE-1B-7B-0924, data pysource, tokens bbbbbbbbbbbb of its own tokenizer" in out
    assert "bits per byte can, on the same text" in " ".join(out.split())
    assert "No difference is shown" not in out
    section = means(read_table(folder))
    assert section.headings == ["model", "n", "seeds", "quality.bpb ↓", "redundancy.min_pes ↓"]
    assert section.lines == [["OLMoE", "1", "—", "0.75", "0.125"], ["Qwen3-MoE", "1", "—", "0.5", "—"]]
    assert {file.name for file in folder.iterdir() if file.is_file()} == {
        "table.md", "table.tex", "table.csv", "table.json", "index.html",
    }  # fmt: skip
    assert "smallest PES" in (folder / "table.md").read_text()


def test_columns_are_chosen_as_for_runs(folder):
    table = read_table(folder, columns=["min_pes"])
    assert means(table).headings[-1] == "redundancy.min_pes ↓"
    assert [*tidy_rows(table)] == [{"model": "OLMoE", "metric": "redundancy.min_pes", "mean": 0.125, "n": 1}]
    with pytest.raises(UserError, match="columns: dust is none of them"):
        read_table(folder, columns=["dust"])


def test_every_number_is_in_the_json_with_what_it_was_measured_on(folder):
    models = json.loads(json.dumps(as_json(read_table(folder))))["models"]
    assert [model["values"] for model in models] == [
        {"quality.bpb": 0.75, "redundancy.min_pes": 0.125},
        {"quality.bpb": 0.5},
    ]
    assert models[0]["digests"] == FACTS["digests"]


def test_analyses_with_other_settings_stand_in_no_table(folder):
    content = {"settings": {"tokens": 7}, "definition": DEFINITION, "metrics": {"bpb": 0.5}}
    write_analysis(folder / "OLMoE" / "analysis" / "quality.json", content)
    with pytest.raises(UserError, match="cannot stand in one table: quality was done with other settings"):
        read_table(folder, columns=["quality.bpb"])


def test_another_model_does_not_go_into_the_same_folder(folder):
    require_same_model(folder / "OLMoE", FACTS)
    other = FACTS | {"digests": {"config": "c" * 64, "weights": "0" * 64}}
    with pytest.raises(UserError, match=r"another digests \(d{16}, not 0{16}\): choose another name="):
        require_same_model(folder / "OLMoE", other)
    assert read_model(folder / "OLMoE")["source"] == FACTS["source"]

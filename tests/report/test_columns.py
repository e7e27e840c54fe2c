"""A table's columns are those that runs have numbers for, or chosen ones of runs and of their analyses."""

import json

import pytest

from simbal.analysis.result import write_analysis
from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.report.columns import choose
from simbal.report.report import report
from simbal.report.table import build


@pytest.fixture
def analysed(write_run):
    """A folder of two arms, of which the first has been analysed."""
    for name in ("lbl", "simbal"):
        path = write_run(name, 0)
    analyse(next(path.parent.glob("lbl-*")), "redundancy", {"min_pes": 0.25, "ppl": 3.0})
    return path.parent


def analyse(run, name, metrics, **settings):
    content = {"settings": settings, "definition": {"min_pes": "least similarity"}, "metrics": metrics}
    write_analysis(run / "analysis" / f"{name}.json", content)


def chosen(folder, *columns):
    return [metric.key for metric in choose(columns, collect(folder))]


def test_a_name_is_the_whole_key_or_its_last_part_and_the_runs_own_number_comes_first(analysed):
    assert chosen(analysed, "ppl", "min_pes", "redundancy.ppl") == ["val/ppl", "redundancy.min_pes", "redundancy.ppl"]


def test_an_arm_that_was_not_analysed_has_a_dash(analysed, capsys):
    report(analysed, columns=["min_pes"])
    shown = capsys.readouterr().out
    assert "0.25" in shown
    assert "—" in shown
    assert "least similarity" not in shown


def test_definitions_are_printed_if_they_are_asked_for_and_stand_in_the_files(analysed, capsys):
    report(analysed, columns=["min_pes"], explain=True)
    assert "redundancy.min_pes: least similarity." in capsys.readouterr().out
    assert "redundancy.min_pes: least similarity." in (analysed / "table.md").read_text()
    assert "redundancy.min_pes" in (analysed / "table.csv").read_text()


def test_an_unknown_or_ambiguous_name_is_refused_with_those_that_there_are(analysed):
    with pytest.raises(UserError, match="columns: speed is none of them; there is val/loss, .*redundancy.min_pes"):
        chosen(analysed, "speed")
    analyse(next(analysed.glob("lbl-*")), "other", {"min_pes": 1.0})
    with pytest.raises(UserError, match="columns: min_pes may be other.min_pes or redundancy.min_pes"):
        chosen(analysed, "min_pes")


def test_analyses_done_with_other_settings_do_not_share_a_table(analysed):
    analyse(next(analysed.glob("simbal-*")), "redundancy", {"min_pes": 0.5}, tokens=7)
    with pytest.raises(UserError, match="cannot stand in one table: redundancy was done with other settings"):
        chosen(analysed, "min_pes")


def test_an_edited_number_of_an_analysis_is_found_out_by_its_checksum(analysed):
    file = next(analysed.glob("lbl-*")) / "analysis" / "redundancy.json"
    file.write_text(file.read_text().replace("0.25", "0.15"))
    with pytest.raises(UserError, match="redundancy.json is broken .its checksum is that of another content.: delete"):
        collect(analysed)


def test_columns_that_no_finished_run_has_a_number_for_are_left_out(write_run):
    dense = {"val/ppl": 9.0, "val/max_vio": None, "val/min_pes": None}
    folder = write_run("none", 0, metrics=dense).parent
    write_run("none", 1, status="failed", metrics={"val/max_vio": 1.0})
    assert [metric.key for metric in build("t", collect(folder)).metrics] == ["val/ppl", "tokens_per_second"]
    write_run("lbl", 0, metrics=dense | {"val/min_pes": 0.25})
    table = build("t", collect(folder))
    assert [metric.heading for metric in table.metrics] == ["perplexity ↓", "min PES ↓", "tokens/s ↑"]


def columns_of(folder):
    return list(json.loads((folder / "table.json").read_text())["metrics"])


def test_the_runs_own_columns_are_taken_if_all_name_the_same(write_run):
    write_run("lbl", 0, keys={"columns": ["max_vio", "ppl"]})
    folder = write_run("simbal", 0, keys={"columns": ["max_vio", "ppl"]}).parent
    write_run("simbal", 1, keys={"columns": None}, status="failed")
    report(folder)
    assert columns_of(folder) == ["val/max_vio", "val/ppl"]
    report(folder, columns=["ppl"])
    assert columns_of(folder) == ["val/ppl"]
    write_run("simbal", 2, keys={"columns": ["ppl"]})
    report(folder)
    assert columns_of(folder) == ["val/ppl", "val/max_vio", "tokens_per_second"]

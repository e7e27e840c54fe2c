"""A table's columns are those that runs have numbers for, or chosen ones of runs and of their analyses."""

import json

import pytest

from simbal.errors import UserError
from simbal.table.collect import collect
from simbal.table.metric import choose
from simbal.table.report import report
from simbal.table.report_keys import report_keys
from simbal.table.table import build


@pytest.fixture
def analysed(write_run):
    """A folder of two arms, of which the first has been analysed."""
    for name in ("lbl", "simbal"):
        path = write_run(name, 0)
    write_analysis(next(path.parent.glob("lbl-*")), "redundancy", {"min_pes": 0.25, "ppl": 3.0})
    return path.parent


def write_analysis(run, name, metrics, **settings):
    (run / "analysis").mkdir(exist_ok=True)
    content = {"settings": settings, "definition": {"min_pes": "least similarity"}, "metrics": metrics}
    (run / "analysis" / f"{name}.json").write_text(json.dumps(content))


def chosen(folder, *columns):
    return [metric.key for metric in choose(columns, collect(folder))]


def test_a_name_is_the_whole_key_or_its_last_part_and_the_runs_own_number_comes_first(analysed):
    assert chosen(analysed, "ppl", "min_pes", "redundancy.ppl") == ["val/ppl", "redundancy.min_pes", "redundancy.ppl"]


def test_an_arm_that_was_not_analysed_has_a_dash(analysed, capsys):
    report(analysed, columns=["min_pes"])
    shown = capsys.readouterr().out
    assert "0.25" in shown
    assert "—" in shown
    assert "redundancy.min_pes: least similarity." in shown
    assert "redundancy.min_pes" in (analysed / "table.csv").read_text()


def test_an_unknown_or_ambiguous_name_is_refused_with_those_that_there_are(analysed):
    with pytest.raises(UserError, match="columns: speed is none of them; there is val/ppl, .*redundancy.min_pes"):
        chosen(analysed, "speed")
    write_analysis(next(analysed.glob("lbl-*")), "other", {"min_pes": 1.0})
    with pytest.raises(UserError, match="columns: min_pes may be other.min_pes or redundancy.min_pes"):
        chosen(analysed, "min_pes")


def test_analyses_done_with_other_settings_do_not_share_a_table(analysed):
    write_analysis(next(analysed.glob("simbal-*")), "redundancy", {"min_pes": 0.5}, tokens=7)
    with pytest.raises(UserError, match="cannot stand in one table: redundancy was done with other settings"):
        chosen(analysed, "min_pes")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"settings": {}, "definition": {}, "metrics": {"a": "b"}}', '{"metrics": {}}']
)
def test_a_broken_analysis_is_an_error_and_no_number(analysed, content):
    (next(analysed.glob("lbl-*")) / "analysis" / "redundancy.json").write_text(content)
    with pytest.raises(UserError, match="redundancy.json is broken: delete it and do the analysis again"):
        collect(analysed)


def test_columns_that_no_finished_run_has_a_number_for_are_left_out(write_run):
    dense = {"val/ppl": 9.0, "load/max_vio": None, "pes/min": None}
    folder = write_run("none", 0, metrics=dense).parent
    write_run("none", 1, status="failed", metrics={"load/max_vio": 1.0})
    assert [metric.key for metric in build("t", collect(folder)).metrics] == ["val/ppl", "tokens_per_second"]
    write_run("lbl", 0, metrics=dense | {"pes/min": 0.25})
    table = build("t", collect(folder))
    assert [metric.heading for metric in table.metrics] == ["perplexity ↓", "min PES ↓", "tokens/s ↑"]


def test_a_number_of_zero_is_a_number(write_run):
    folder = write_run("none", 0, metrics={"load/max_vio": 0.0}).parent
    assert [metric.key for metric in build("t", collect(folder)).metrics] == ["load/max_vio", "tokens_per_second"]


def columns_of(folder):
    return list(json.loads((folder / "table.json").read_text())["metrics"])


def test_the_runs_own_columns_are_taken_if_all_name_the_same(write_run):
    write_run("lbl", 0, keys={"columns": ["max_vio", "ppl"]})
    folder = write_run("simbal", 0, keys={"columns": ["max_vio", "ppl"]}).parent
    write_run("simbal", 1, keys={"columns": None}, status="failed")
    report(folder)
    assert columns_of(folder) == ["load/max_vio", "val/ppl"]
    report(folder, columns=["ppl"])
    assert columns_of(folder) == ["val/ppl"]
    write_run("simbal", 2, keys={"columns": ["ppl"]})
    report(folder)
    assert columns_of(folder) == ["val/ppl", "load/max_vio", "tokens_per_second"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("colums=[ppl]", "colums=.ppl.: give baseline="),
        ("--baseline", "--baseline: give baseline="),
        ("columns=ppl", "columns must be a list such as"),
        ("paper=maybe", "paper must be true or false"),
        ("columns=[", "columns must be a list such as"),
    ],
)
def test_a_slip_in_an_argument_is_one_sentence(line, says):
    with pytest.raises(UserError, match=says):
        report_keys([line])


def test_arguments_are_written_as_everywhere_else():
    assert report_keys(["baseline=none", "columns=[ppl,val/bpb]", "paper=true"]) == {
        "baseline": "none", "columns": ["ppl", "val/bpb"], "paper": True,
    }  # fmt: skip

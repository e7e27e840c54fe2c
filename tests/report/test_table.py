"""The table says which runs, how many, how far apart, and what it cannot say."""

import csv
import io
import json
import re
from math import log
from statistics import fmean, stdev

import pytest
from rich.console import Console

from simbal.errors import UserError
from simbal.report import terminal
from simbal.report.arms import label_columns, label_of, short_label
from simbal.report.collect import collect
from simbal.report.columns import ABSENT, Cell
from simbal.report.notes import notes
from simbal.report.report import report
from simbal.report.statistics import holm
from simbal.report.table import build


def table_of(folder, baseline=None):
    return build(folder.name, collect(folder), baseline)


def shown(table, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False, markup=False)  # noqa: SIM115, PTH123
    with console.file:
        terminal.show(table, console)
    return console.export_text()


@pytest.fixture
def two_arms(write_run):
    """lbl at 101, 103, 105 and simbal 4, 3 and 2 below it, on three seeds."""
    for seed, ppl, gain in ((0, 101.0, 4.0), (1, 103.0, 3.0), (2, 105.0, 2.0)):
        write_run("lbl", seed, metrics={"val/ppl": ppl, "val/max_vio": 0.25})
        folder = write_run("simbal", seed, metrics={"val/ppl": ppl - gain, "val/max_vio": 0.5}).parent
    return folder


@pytest.mark.parametrize("reverse", [False, True])
def test_an_arm_has_one_name_whichever_run_comes_first(small_spec, reverse):
    arms = [("balancing=frozen", "optim.lr=1e-3"), ("balancing=simbal", "balancing.simbal.coef=0.2", "optim.lr=2e-3")]
    arms += [("balancing=simbal", f"balancing.simbal.coef={coef}", "optim.lr=1e-3") for coef in (0.1, 0.2)]
    specs = [small_spec(*arm) for arm in (reversed(arms) if reverse else arms)]
    columns = label_columns(specs)
    names = {short_label(label_of(spec, columns)) for spec in specs}
    assert names == {
        "frozen lr=0.001",
        "simbal lr=0.002 coef=0.2",
        "simbal lr=0.001 coef=0.1",
        "simbal lr=0.001 coef=0.2",
    }


def test_an_arm_is_the_runs_that_differ_in_the_seed_alone(two_arms):
    baseline, treatment = table_of(two_arms).rows
    assert (baseline.arm.name, baseline.arm.seeds) == ("lbl", [0, 1, 2])
    assert (treatment.arm.name, treatment.arm.seeds) == ("simbal", [0, 1, 2])
    assert (baseline.summaries["val/ppl"].mean, baseline.summaries["val/ppl"].sd) == (103.0, 2.0)
    assert treatment.summaries["val/ppl"].n == 3


def test_the_difference_is_paired_by_seed(two_arms):
    baseline, treatment = table_of(two_arms).rows
    difference = treatment.differences["val/ppl"]
    logs = [log(97 / 101), log(100 / 103), log(103 / 105)]
    assert (difference.mean, difference.pairs) == (pytest.approx(fmean(logs)), 3)
    assert difference.low == pytest.approx(fmean(logs) - 4.302652730 * stdev(logs) / 3**0.5)  # t(0.975, 2)
    assert not baseline.differences
    assert "tokens_per_second" not in treatment.differences


def test_a_number_whose_difference_is_not_resolved_is_faint_and_that_is_said(write_run):
    for seed, gain in ((0, 4.0), (1, -3.0), (2, 2.0)):
        write_run("lbl", seed, metrics={"val/ppl": 100.0, "val/max_vio": 0.25 + seed / 1000})
        folder = write_run("simbal", seed, metrics={"val/ppl": 100 - gain, "val/max_vio": 0.5}).parent
    console = Console(width=120, record=True, file=io.StringIO(), highlight=False, markup=False, force_terminal=True)
    terminal.show(table_of(folder), console)
    printed = console.export_text(styles=True)
    (means,) = re.findall(r"simbal +3 +0-2.*", printed.rpartition("standard deviation over seeds")[2])
    assert re.search(r"\x1b\[2m[^\x1b]*99\.000 ", means)  # ppl
    assert re.search(r"\x1b\[2m[^\x1b]*0\.500", means) is None  # MaxVio, which is clearly higher
    assert "Faint: the difference to lbl is not resolved." in printed


def test_a_perplexity_that_has_no_logarithm_is_refused_with_its_run(write_run):
    write_run("lbl", 0)
    run = write_run("simbal", 0, metrics={"val/ppl": 0.0})
    with pytest.raises(UserError, match=f"{run} cannot be compared: its val/ppl is 0.0, which must be above 0"):
        table_of(run.parent)


def test_any_arm_can_be_the_baseline(two_arms):
    baseline, treatment = table_of(two_arms, "simbal").rows
    assert (baseline.arm.name, treatment.arm.name) == ("simbal", "lbl")
    assert treatment.differences["val/ppl"].mean > 0


@pytest.fixture
def coefficients(write_run):
    """lbl, and simbal with three coefficients, each better than the one before."""
    for seed in range(3):
        write_run("lbl", seed, metrics={"val/ppl": 20.0 + seed})
        for coef, gain in ((0.1, 1.0), (0.2, 2.0), (0.3, 3.0)):
            keys = {"balancing.simbal.coef": coef}
            run = write_run("simbal", seed, keys=keys, metrics={"val/ppl": 20.0 + seed - gain - seed * coef})
    return run.parent


def test_one_of_several_arms_of_a_balancing_is_the_baseline_by_its_name(coefficients):
    first, *others = table_of(coefficients, "simbal coef=0.2").rows
    assert (first.arm.name, first.differences) == ("simbal coef=0.2", {})
    assert {row.arm.name: row.differences["val/ppl"].mean < 0 for row in others} == {
        "lbl": False, "simbal coef=0.1": False, "simbal coef=0.3": True,
    }  # fmt: skip
    assert not any(note.startswith("No difference") for note in notes(table_of(coefficients, "simbal coef=0.2")))


@pytest.mark.parametrize("name", ["simbal coef=0.20", "simba", "zzz"])
def test_a_baseline_that_no_arm_is_is_refused_with_the_nearest(coefficients, name):
    with pytest.raises(UserError, match=f"baseline={name}: no arm is that; there is .*simbal"):
        report(coefficients, name)


def test_every_pair_is_compared_and_corrected_over_all_pairs(coefficients):
    report(coefficients, compare="all")
    table = build("t", collect(coefficients), pairs=True)
    assert [(row.arm.name, row.other.name) for row in table.pairs] == [
        ("simbal coef=0.1", "lbl"),
        ("simbal coef=0.2", "lbl"),
        ("simbal coef=0.2", "simbal coef=0.1"),
        ("simbal coef=0.3", "lbl"),
        ("simbal coef=0.3", "simbal coef=0.1"),
        ("simbal coef=0.3", "simbal coef=0.2"),
    ]
    found = [row.differences["val/ppl"] for row in table.pairs]
    assert [one.p_holm for one in found] == pytest.approx(holm([one.p for one in found]))
    logs = table.pairs[1].differences["val/ppl"].mean - table.pairs[0].differences["val/ppl"].mean
    assert found[2].mean == pytest.approx(logs)
    assert not any(row.differences for row in table.rows)
    assert "corrected for the pairs of arms by one metric" in " ".join(notes(table))
    kept = json.loads((coefficients / "table.json").read_text())["pairs"]
    lines = [*csv.DictReader((coefficients / "table.csv").read_text().splitlines())]
    paired = [line for line in lines if line["difference"] and line["metric"] == "val/ppl"]
    assert [float(line["difference"]) for line in paired] == [one["differences"]["val/ppl"]["mean"] for one in kept]
    assert [line["baseline"] for line in paired] == [one["other"] for one in kept]
    for file in ("table.md", "table.tex", "index.html"):
        text = (coefficients / file).read_text()
        assert "simbal coef=0.3 - simbal coef=0.2" in text
        assert "of every two arms" in text


def test_columns_are_what_differs_and_the_baseline_is_like_in_all_else(write_run):
    for model in ("tiny", "small"):
        for balancing in ("lbl", "simbal"):
            keys = {"model": model, "model.d_expert": 64 if model == "tiny" else 128}
            folder = write_run(balancing, 0, keys=keys, metrics={"val/ppl": 1.0 if balancing == "lbl" else 2.0}).parent
    write_run("simbal", 0, keys={"model": "tiny", "balancing.simbal.coef": 1.0})
    table = table_of(folder)
    assert table.columns == ["balancing", "model", "balancing.simbal.coef"]
    assert [row.arm.name for row in table.rows] == [
        "lbl model=small",
        "lbl model=tiny",
        "simbal model=small coef=0.1",
        "simbal model=tiny coef=0.1",
        "simbal model=tiny coef=1.0",
    ]
    assert [bool(row.differences) for row in table.rows] == [False, False, True, True, True]


def test_a_name_says_coef_of_the_one_strategy_and_whose_it_is_of_several():
    def name(label):
        return short_label({column: Cell(text) for column, text in label.items()})

    alone = {"balancing": "lbl", "balancing.lbl.coef": "0.1", "balancing.lbl.scope": "micro", "a.b": ABSENT}
    assert name(alone) == "lbl coef=0.1 scope=micro"
    both = {"balancing": "lbl_x", "balancing.lbl.coef": "0.1", "balancing.x.coef": "1", "optim.lr": "0.2"}
    assert name(both) == "lbl_x balancing.lbl.coef=0.1 balancing.x.coef=1 lr=0.2"


def test_a_key_that_confounds_the_comparison_is_a_column(write_run):
    write_run("lbl", 0)
    table = table_of(write_run("simbal", 0, keys={"optim.lr": 0.1}).parent)
    assert table.columns == ["balancing", "optim.lr"]
    assert "No difference is shown for simbal lr=0.1: no finished run has balancing=lbl" in notes(table)[0]


def test_two_baselines_give_no_difference_and_a_note(write_run):
    write_run("lbl", 0)
    write_run("lbl", 0, keys={"balancing.lbl.coef": 0.5})
    table = table_of(write_run("simbal", 0).parent)
    assert not any(row.differences for row in table.rows)
    assert "No difference is shown for simbal: several arms are the baseline, balancing=lbl." in notes(table)


def test_no_shared_seed_gives_no_difference_and_a_note(write_run):
    write_run("lbl", 0)
    table = table_of(write_run("simbal", 1).parent)
    assert "No difference is shown for simbal: it shares no seed with the baseline." in notes(table)


def test_several_baseline_keys_give_no_difference_unless_one_is_chosen(write_run):
    write_run("lbl", 0)
    folder = write_run("simbal", 0, keys={"baseline": "none"}).parent
    assert "choose one with baseline=" in notes(table_of(folder))[0]
    assert table_of(folder, "lbl").rows[1].differences


def test_one_seed_has_a_mean_and_no_standard_deviation(write_run):
    write_run("lbl", 0, metrics={"val/ppl": 101.25})
    table = table_of(write_run("simbal", 0, metrics={"val/ppl": 99.5}).parent)
    text = shown(table)
    assert "101.250" in text
    assert "± " not in text.replace("mean ± standard", "")
    assert any(note.startswith("One seed has no standard deviation") for note in notes(table))


def test_a_metric_that_a_model_has_not_is_a_dash_and_counts_for_no_seed(write_run):
    write_run("none", 0, metrics={"val/ppl": 1.0, "val/max_vio": None})
    table = table_of(write_run("none", 1, metrics={"val/ppl": 1.0, "val/max_vio": 0.5}).parent)
    (row,) = table.rows
    assert row.summaries["val/max_vio"].n == 1
    assert "(n=1)" in shown(table)


def test_failed_and_unfinished_runs_are_listed_with_their_error_and_count_for_nothing(write_run):
    write_run("lbl", 0)
    write_run("lbl", 1, status="failed", error="killed by signal 9")
    table = table_of(write_run("lbl", 2, status=None).parent)
    assert table.rows[0].arm.seeds == [0]
    text = shown(table)
    assert "killed by signal 9" in text
    assert "unfinished" in text


def test_csv_and_json_trace_every_number_to_its_runs(two_arms):
    report(two_arms)
    rows = list(csv.DictReader((two_arms / "table.csv").read_text().splitlines()))
    (row,) = [row for row in rows if row["balancing"] == "simbal" and row["metric"] == "val/ppl"]
    assert (row["mean"], row["n"], row["seeds"]) == ("100.0", "3", "0 1 2")
    assert (row["baseline"], row["scale"], row["pairs"]) == ("lbl", "ln", "3")
    arm = json.loads((two_arms / "table.json").read_text())["arms"][1]
    assert arm["differences"]["val/ppl"]["mean"] == float(row["difference"])
    values = [run["values"]["val/ppl"] for run in arm["runs"]]
    assert arm["summaries"]["val/ppl"]["mean"] == sum(values) / len(values)
    assert [run["seed"] for run in arm["runs"]] == [0, 1, 2]
    for run in arm["runs"]:
        assert run["folder"] in {str(path) for path in two_arms.iterdir()}


def test_a_key_of_a_strategy_that_some_runs_lack_tells_arms_apart(two_arms, write_run):
    write_run("lbl", 7, keys={"balancing.lbl.scope": "sequence"})
    names = [row.arm.name for row in table_of(two_arms).rows]
    assert names == ["lbl scope=sequence", "lbl", "simbal"]
    report(two_arms)

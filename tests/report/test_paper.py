"""With paper=true the paper's numbers are shown next to ours."""

import pytest

from simbal.metrics.definitions import NUMBERS
from simbal.report import sections
from simbal.report.collect import collect
from simbal.report.notes import notes
from simbal.report.paper import PAPER
from simbal.report.table import build


def strategies(**coefs: float | None) -> dict:
    """The `balancing` of a config, with each strategy's coefficient if it has one."""
    plain = {"_target_": "simbal.balancing.weight_losses.SimBal"}
    return {"balancing": {name: plain if coef is None else plain | {"coef": coef} for name, coef in coefs.items()}}


@pytest.fixture
def folder(write_run):
    metrics = {"val/ppl": 100.0, "val/max_vio": 0.5, "val/seu": 0.9}
    for name, coef in (("lbl", 0.01), ("simbal", 0.1), ("lf", None)):
        folder = write_run(name, 0, keys=strategies(**{name: coef}), metrics=metrics).parent
    return folder


def cells(table, balancing):
    section = sections.means(table)
    (row,) = [row for row in section.lines if row[0] == balancing]
    return [cell for heading, cell in zip(section.headings, row, strict=True) if heading == "paper M / L"]


def test_a_row_has_the_numbers_of_its_strategies_and_a_dash_if_there_are_none(folder):
    table = build("t", collect(folder), paper=True)
    headings = sections.means(table).headings
    assert headings[3:7] == ["perplexity ↓", "paper M / L", "MaxVio ↓", "SEU"]
    assert cells(table, "simbal") == ["13.691 ± 0.039 / 8.304", "— / 0.991"]
    assert cells(table, "lf") == ["13.708 / —", "0.505 / —"]
    assert any("arXiv 2506.14038 (tables 3, 4, 7, 8, 9 and 10)" in note for note in notes(table))
    assert not cells(build("t", collect(folder)), "simbal")


def test_gating_and_density_decide_too(write_run):
    write_run("lf", 0, keys={"router.gating": "sigmoid"} | strategies(lf=None))
    write_run("simbal", 0, keys={"router.gating": "sigmoid"})
    table = build("t", collect(write_run("none", 0, keys={"model.num_experts": 0}).parent), paper=True)
    assert cells(table, "lf") == ["13.618 / —"]
    assert cells(table, "simbal") == ["—"]  # the paper has SimBal only with softmax
    assert cells(table, "none") == ["19.468 / 10.047"]


def test_the_coefficients_decide_which_arm_of_the_paper_it_is(write_run):
    reported = {0.01: "13.687 / —", 0.1: "13.691 ± 0.039 / 8.304", 1: "13.716 / —", 0.3: "—"}
    for coef in reported:
        write_run("simbal", 0, keys=strategies(simbal=coef))
    write_run("lf_simbal", 0, keys=strategies(lf=None, simbal=0.1))
    table = build("t", collect(write_run("lf_lbl", 0, keys=strategies(lf=None, lbl=0.1)).parent), paper=True)
    section = sections.means(table)
    place, coef = section.headings.index("paper M / L"), section.headings.index("balancing.simbal.coef")
    assert {float(row[coef]): row[place] for row in section.lines if row[0] == "simbal"} == reported
    assert (cells(table, "lf_simbal")[0], cells(table, "lf_lbl")[0]) == ("13.695 / —", "—")


@pytest.mark.parametrize("reading", [{"schedule": [[0, 1], [100, 0]]}, {"reduction": "mean"}])
def test_another_definition_of_the_loss_is_no_arm_of_the_paper(write_run, reading):
    keys = strategies(simbal=0.1)
    keys["balancing"]["simbal"] |= reading
    table = build("t", collect(write_run("simbal", 0, keys=keys).parent), paper=True)
    assert "The paper reports none of these columns for these strategies." in notes(table)


@pytest.mark.parametrize("key", [{"router.input": "embedding"}, {"router.scale": 1.5}, {"model.token_table": True}])
def test_another_router_or_a_token_table_is_no_arm_of_the_paper(write_run, key):
    table = build("t", collect(write_run("simbal", 0, keys=strategies(simbal=0.1) | key).parent), paper=True)
    assert "The paper reports none of these columns for these strategies." in notes(table)


def test_every_number_of_the_paper_is_one_of_our_metrics():
    assert {quantity for known in PAPER.values() for quantity in known} <= {metric.name for metric in NUMBERS}

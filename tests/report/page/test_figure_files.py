import csv
import re
from xml.etree import ElementTree

import pytest

from simbal.report.page import figure_files, page
from simbal.report.page.figure_files import curves_csv, write_figures
from simbal.report.report import report


@pytest.fixture
def cards(write_run, sweep, table_of):
    for balancing in ("lbl", "simbal"):
        for seed in (0, 1):
            write_run(balancing, seed)
    return page.cards_of(table_of(sweep), sweep)


def test_every_figure_stands_alone_as_svg_and_pdf(cards, sweep):
    shown = [card for card in cards if card.name in ("loss", "loads")]
    write_figures(shown, sweep)
    assert {file.name for file in (sweep / "figures").iterdir()} == {
        "loss.svg", "loss.pdf", "loads.svg", "loads.pdf", "curves.csv"
    }  # fmt: skip
    for name in ("loss", "loads"):
        root = ElementTree.parse(sweep / f"figures/{name}.svg").getroot()
        assert not [*root.iter("{http://www.w3.org/2000/svg}text")]  # letters are paths
        assert "fill: #ffffff" in (sweep / f"figures/{name}.svg").read_text()
        pdf = (sweep / f"figures/{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF")
        assert b"/FontFile2" in pdf
        assert b"/Type3" not in pdf


def test_the_numbers_drawn_stand_in_a_file(cards):
    lines = [*csv.DictReader(curves_csv(cards).splitlines())]
    assert {line["figure"] for line in lines} == {card.name for card in cards if card.chart}
    first = next(line for line in lines if line["figure"] == "loss" and line["arm"] == "simbal")
    assert (float(first["x"]), float(first["mean"])) == (0, 8.5)
    assert first["band"] == "95% interval of the difference to lbl"
    assert float(first["low"]) <= 8.5 <= float(first["high"])
    assert {line["panel"] for line in lines if line["figure"] == "pes"} == {"layer 0", "layer 1"}


def test_a_name_that_no_font_has_and_hostile_ones_are_drawn(write_run, sweep, table_of):
    write_run(keys={"optim.lr": 0.5, "data.cache_dir": "x"})
    write_run("漢<b>$x^2$", 1)
    write_figures(page.cards_of(table_of(sweep), sweep)[:1], sweep)
    assert (sweep / "figures/loss.pdf").stat().st_size > 1000


def test_report_writes_them_when_it_is_asked_to(write_run, sweep, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(page, "write", lambda *_: None)
    monkeypatch.setattr(figure_files, "write_figures", lambda cards, folder: given.append((len(cards), folder)))
    write_run()
    report(sweep)
    assert given == []
    report(sweep, figures=True)
    ((count, folder),) = given
    assert count >= 5
    assert folder == sweep
    assert re.search(r"table\.json, figures/\s+and\s+index\.html", capsys.readouterr().out)

"""The terminal shows as much as fits, files have everything, and LaTeX is balanced and escaped."""

import csv
import io
import json
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from simbal.report.collect import collect
from simbal.report.notes import notes
from simbal.report.render import MOST_NOTE_LINES, latex, show, write_tables
from simbal.report.report import report
from simbal.report.table import build

DOCUMENT = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs}\begin{document}\input{table.tex}"


@pytest.fixture
def folder(write_run):
    """lbl and simbal on three seeds, with a clear difference in MaxVio and none in perplexity, and a failed run."""
    for seed, gain in ((0, 4.0), (1, -3.0), (2, 2.0)):
        write_run("lbl", seed, metrics={"val/ppl": 100.0, "val/max_vio": 0.25 + seed / 1000})
        write_run("simbal", seed, metrics={"val/ppl": 100 - gain, "val/max_vio": 0.5})
    return write_run("simbal", 3, status="failed", error="50% & {_} #1\nof ~2^3 \\\n\n模").parent


def printed(table, width, styles=False, **options):
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False, markup=False, force_terminal=True)
    show(table, console, **options)
    return console.export_text(styles=styles)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_what_fits_and_names_what_is_left_out(folder, width):
    table = build("t", collect(folder))
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "not resolved" in " ".join(text.split())
    assert ("Left out at this width" in text) == (width < 120)


def test_the_terminal_has_at_most_four_lines_of_notes_unless_all_are_requested(folder):
    table = build("t", collect(folder))
    assert len(notes(table)) > MOST_NOTE_LINES
    assert sum(note in " ".join(printed(table, 400).split()) for note in notes(table)) <= MOST_NOTE_LINES
    everything = printed(table, 1000, explain=True)
    assert all(note in everything for note in notes(table))


def test_a_number_whose_difference_is_not_resolved_is_faint(folder):
    text = printed(build("t", collect(folder)), 160, styles=True, explain=True)
    (means,) = re.findall(r"simbal +3 +0-2.*", text.rpartition("standard deviation over seeds")[2])
    assert re.search(r"\x1b\[2m[^\x1b]*99\.000 ", means)  # perplexity
    assert re.search(r"\x1b\[2m[^\x1b]*0\.500", means) is None  # MaxVio, which is clearly higher
    assert "Faint: the difference from lbl is not resolved." in text


def test_csv_and_json_trace_every_number_to_its_runs(folder):
    write_tables(build("t", collect(folder)), folder)
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    (row,) = [row for row in rows if row["balancing"] == "simbal" and row["metric"] == "val/ppl"]
    assert (row["mean"], row["n"], row["seeds"]) == ("99.0", "3", "0 1 2")
    assert (row["baseline"], row["scale"], row["pairs"], row["conclusion"]) == ("lbl", "ln", "3", "not resolved")
    content = json.loads((folder / "table.json").read_text())
    arm = content["arms"][1]
    difference = arm["differences"]["val/ppl"]
    assert (difference["mean"], difference["detectable"]) == (float(row["difference"]), float(row["detectable"]))
    assert content["equivalence_margin"] == 0.026
    values = [run["values"]["val/ppl"] for run in arm["runs"]]
    assert arm["summaries"]["val/ppl"]["mean"] == sum(values) / len(values)
    assert {run["folder"] for run in arm["runs"]} <= {str(path) for path in folder.iterdir()}


def test_all_files_have_the_pairs(folder):
    report(folder, compare="all", save=True)
    (pair,) = json.loads((folder / "table.json").read_text())["pairs"]
    lines = csv.DictReader((folder / "table.csv").read_text().splitlines())
    line = next(line for line in lines if line["difference"])
    assert float(line["difference"]) == pair["differences"]["val/ppl"]["mean"]
    assert (line["balancing"], line["baseline"]) == (pair["arm"], pair["other"]) == ("simbal", "lbl")
    for file in ("table.md", "table.tex", "index.html"):
        assert "simbal - lbl" in (folder / file).read_text()


def test_keys_that_change_the_table_are_only_printed_unless_saved(folder, capsys):
    report(folder, columns=["ppl"])
    assert not (folder / "table.md").exists()
    assert "nothing written" in capsys.readouterr().out
    report(folder, columns=["ppl"], save=True)
    assert "MaxVio" not in (folder / "table.md").read_text()
    report(folder)
    assert "MaxVio" in (folder / "table.md").read_text()


def test_latex_is_balanced_has_a_cell_for_every_column_and_escapes_what_latex_acts_on(folder):
    text = latex(build("t_1", collect(folder), paper=True))
    tabulars = re.findall(r"\\begin{tabular}{([lr]+)}\n(.*?)\\end{tabular}", text, re.DOTALL)
    assert len(tabulars) == 3  # means, differences and the failed run
    for columns, body in tabulars:
        for row in [line for line in body.splitlines() if line.endswith(r"\\")]:
            assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
    assert re.findall(r"\\begin{(\w+)}", text) == re.findall(r"\\end{(\w+)}", text)
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert r"lbl & 3 & 0-2 & 100.000 $\pm$ 0.000 &" in text
    assert r"perplexity $\downarrow$" in text
    assert r"50\% \& \{\_\} \#1 of \textasciitilde{}2\textasciicircum{}3 \textbackslash{} U+6A21" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(folder, tmp_path):
    write_tables(build("t", collect(folder)), folder)
    (folder / "document.tex").write_text(DOCUMENT + r"\end{document}")
    command = f"pdflatex -interaction=nonstopmode -halt-on-error -output-directory={tmp_path} document.tex"
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]

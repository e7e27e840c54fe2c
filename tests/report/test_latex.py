"""table.tex is LaTeX: balanced, as many cells as columns, and nothing in a cell that LaTeX would act on."""

import re
import shutil
import subprocess

import pytest

from simbal.report.collect import collect
from simbal.report.export import latex
from simbal.report.report import report
from simbal.report.table import build

DOCUMENT = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs}\begin{document}\input{table.tex}"


@pytest.fixture
def folder(write_run):
    for seed in range(3):
        write_run("lf_lbl", seed, keys={"baseline": "lf_lbl"})
        write_run("simbal", seed, keys={"baseline": "lf_lbl"}, metrics={"val/ppl": 90.0 - seed**2, "val/max_vio": 0.5})
    return write_run(
        "simbal", 3, keys={"baseline": "lf_lbl"}, status="failed", error="50% & {_} #1\nof ~2^3 \\\n\n模"
    ).parent


def tabulars(text):
    return re.findall(r"\\begin{tabular}{([lr]+)}\n(.*?)\\end{tabular}", text, re.DOTALL)


def test_every_row_has_a_cell_for_every_column(folder):
    found = tabulars(latex(build("t", collect(folder), paper=True)))
    assert len(found) == 3  # means, differences and the failed run
    for columns, body in found:
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        for row in rows:
            assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
        assert [line for line in body.splitlines() if not line.endswith(r"\\")] == [
            r"\toprule", r"\midrule", r"\bottomrule",
        ]  # fmt: skip


def test_environments_and_braces_are_balanced(folder):
    text = latex(build("t", collect(folder)))
    assert re.findall(r"\\begin{(\w+)}", text) == re.findall(r"\\end{(\w+)}", text)
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")


def test_what_latex_would_act_on_is_escaped(folder):
    report(folder)
    text = (folder / "table.tex").read_text()
    assert r"lf\_lbl & 3 & 0-2 & 101.000 $\pm$ 1.000 &" in text
    assert r"perplexity $\downarrow$" in text
    assert r"50\% \& \{\_\} \#1 of \textasciitilde{}2\textasciicircum{}3 \textbackslash{} U+6A21" in text
    assert text.encode("latin-1")  # no sign that pdflatex may not know


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_it_compiles_where_there_is_a_latex(folder, tmp_path):
    report(folder)
    (folder / "document.tex").write_text(DOCUMENT + r"\end{document}")
    command = f"pdflatex -interaction=nonstopmode -halt-on-error -output-directory={tmp_path} document.tex"
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]

"""The notebook in the guide runs, and is checked in without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from simbal.report.collect import collect
from tests.child_processes import DEADLINE_SECONDS

NOTEBOOK = Path(__file__).parents[2] / "docs/examples/first_look.ipynb"


def test_notebook_is_short_and_has_no_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert len(cells) <= 10
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_notebook_shows_the_runs_a_curve_and_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    limits = {"timeout": DEADLINE_SECONDS, "startup_timeout": DEADLINE_SECONDS}
    NotebookClient(notebook, **limits, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [run.finished for run in collect(tmp_path / "outputs/first_look")] == [True, True]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/svg+xml" in output["data"] for output in outputs) == 1
    texts = " ".join(output["data"].get("text/plain", "") for output in outputs)
    assert all(word in texts for word in ("finished", "val/ppl", "difference"))

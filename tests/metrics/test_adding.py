"""A metric is one entry of one file, and an analysis one function and one YAML file: both are added to a copy."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CONF, MARKOV, SMALL

pytestmark = pytest.mark.slow
ROOT = CONF.parent
METRIC = """\
    Metric(
        "gini", "Gini", "Gini coefficient of the tokens per expert, mean over layers", "", "{:.3f}", "lower",
        column=True, by_layer=lambda sums: routing.gini(sums.counts_LE), over_layers=_mean,
    ),
"""
ANALYSIS = '''\
"""The analysis `head`: the largest entry of the head."""

from simbal.analysis.result import Result
from simbal.analysis.trained import TrainedRun

DEFINITION = {"largest_entry": "largest absolute entry of the head times `scale`"}


def head(trained: TrainedRun, scale: float) -> Result:
    """Measure the head of the final weights."""
    largest = scale * trained.model.head_VD.abs().max().item()
    return Result([], [], {"definition": DEFINITION, "metrics": {"largest_entry": largest}})
'''
PAGE = "from generators.definitions import definitions_page; from pathlib import Path; print(definitions_page(Path()))"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the programs with the metric and the analysis, and one run that it has trained."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("src", "conf", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("train.py", "evaluate.py", "report.py"):
        shutil.copy(ROOT / file, copy)
    table = copy / "src/simbal/metrics/definitions.py"
    before, first, after = table.read_text().partition("VALIDATION = (\n")
    table.write_text(before + first + METRIC + after)
    (copy / "src/simbal/analysis/head.py").write_text(ANALYSIS)
    (copy / "conf/analysis/head.yaml").write_text(
        "# largest entry of the head\nhead:\n  _target_: simbal.analysis.head.head\n  scale: 1.0\n"
    )
    command = [*SMALL, *MARKOV, "name=x", "output_dir=outputs", "data.cache_dir=data", "trainer.max_steps=2"]
    program(copy, "train.py", "balancing=lbl", *command)
    program(copy, "evaluate.py", "run=outputs/x", "analysis=head", "data.cache_dir=data")
    return copy


def program(copy: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy / 'docs'}"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def touched(copy: Path, folder: str) -> list[str]:
    """The files of a folder that are new or other than in the repository."""
    files = [path.relative_to(copy) for path in sorted((copy / folder).rglob("*.*")) if path.suffix in (".py", ".yaml")]
    return [
        str(file)
        for file in files
        if not (ROOT / file).exists() or not filecmp.cmp(ROOT / file, copy / file, shallow=False)
    ]


def test_three_files_are_touched(copy):
    assert touched(copy, "src") == ["src/simbal/analysis/head.py", "src/simbal/metrics/definitions.py"]
    assert touched(copy, "conf") == ["conf/analysis/head.yaml"]


def test_a_metric_is_in_the_record_and_the_curves_by_layer_too_and_in_the_table_and_the_definitions(copy):
    (run,) = (copy / "outputs/x").glob("lbl-*")
    record = json.loads((run / "record.json").read_text())
    by_layer = record["layers"]["val/gini"]
    assert record["metrics"]["val/gini"] == pytest.approx(sum(by_layer) / len(by_layer))
    assert len(by_layer) == 2
    assert "Gini coefficient" in record["definitions"]["val/gini"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["layers"]["val/gini"] for row in rows if "val/gini" in row][-1] == by_layer
    printed = program(copy, "report.py", "outputs/x", "explain=true")
    assert "Gini ↓" in printed
    assert "Gini: Gini coefficient of the tokens per expert, mean over layers." in printed
    assert "<code>val/gini</code> | Gini |" in program(copy, "-c", PAGE)


def test_a_number_of_an_analysis_is_in_the_table_and_the_definitions(copy):
    printed = program(copy, "report.py", "outputs/x", "columns=[largest_entry]", "explain=true")
    assert "head.largest_entry: largest absolute entry of the head" in printed
    assert "largest absolute entry of the head" in program(copy, "-c", PAGE)

"""What is checked in under results/ is whole, of one command each, and drawn from its own numbers."""

import json
import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml

from simbal.report.reproduce import drawing
from simbal.report.reproduce.evidence import Study, studies
from simbal.report.reproduce.kept import RUNS, bring_back
from tests import composing
from tests.conftest import CONF
from tests.report.reproduce.test_reproduce import config

RESULTS = CONF.parent / "results"
STUDIES = sorted(file.parent.name for file in RESULTS.glob("*/origin.json"))
SEARCHES = {"bench_tuning"}  # their points are drawn
KEPT_ITS_RUNS = {"significance_bench"}  # in a checkout that was dirty by that alone, before results/ did not count
OF_SCALES = [
    (file.stem, name)
    for file in sorted((CONF / "scale").glob("*.yaml"))
    for name in yaml.safe_load(file.read_text())["studies"]
]


@cache
def of_scale(scale: str) -> list[Study]:
    return studies(config(f"scale={scale}"))


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_study_is_in_its_table_and_the_command_is_still_the_same(name):
    origin, table = (json.loads((RESULTS / name / file).read_text()) for file in ("origin.json", "table.json"))
    assert origin["finished"] == origin["runs"] == sum(len(arm["runs"]) for arm in table["arms"])
    assert (table["without_result"], table["missing"]) == ([], [])
    assert name in KEPT_ITS_RUNS or not any(code["dirty"] for code in origin["code"])
    [study] = [study for study in of_scale("cpu") if study.name == name]
    command, _, _ = origin["command"].partition(" name=")  # of a run's folder, which decides nothing
    assert f"python train.py -m {shlex.join(study.overrides)}".startswith(f"{command} name=")
    assert origin["analyses"] == study.analyses


@pytest.mark.parametrize(("scale", "name"), OF_SCALES)
def test_every_study_of_every_scale_can_be_composed_to_the_runs_that_were_done(scale, name):
    [study] = [study for study in of_scale(scale) if study.name == name]
    jobs = composing.compose(["-m", *study.overrides])
    assert {Path(job["folder"]).parent for job in jobs} == {study.folder}
    if scale == "cpu" and name in STUDIES and name not in SEARCHES:
        arms = json.loads((RESULTS / name / "table.json").read_text())["arms"]
        done, asked = {run["config_hash"] for arm in arms for run in arm["runs"]}, {job["hash"] for job in jobs}
        assert done == asked


@pytest.mark.parametrize("name", STUDIES)
def test_its_figures_are_drawn_from_its_numbers(name, tmp_path):
    shutil.copy(RESULTS / name / "curves.csv", tmp_path)
    drawn = shutil.copytree(tmp_path, tmp_path / name)
    drawing.draw(drawn)
    kept = {file.name: file.read_text() for file in (RESULTS / name).glob("*.svg")}
    assert {file.name: file.read_text() for file in drawn.glob("*.svg")} == kept
    assert kept


@pytest.mark.parametrize("name", STUDIES)
def test_somebody_has_read_it_and_shows_every_figure(name):
    reading = (RESULTS / name / "README.md").read_text()
    assert [file.name for file in (RESULTS / name).glob("*.svg") if f"({file.name})" not in reading] == []
    assert f"({name}/README.md)" in (RESULTS / "README.md").read_text()


def test_nothing_names_a_place_on_the_machine_that_it_was_made_on(tmp_path):
    for kept in RESULTS.glob(f"*/{RUNS}"):
        bring_back(kept.parent, tmp_path / kept.parent.name)
    files = [file for place in (RESULTS, tmp_path) for file in place.rglob("*") if file.is_file() and file.name != RUNS]
    assert len(files) > len(STUDIES) > 0
    places = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|work)/")
    assert [file.name for file in files if places.search(file.read_text())] == []

"""The numbers of every study follow from its rows.csv, and one changed digit is found."""

import json
import re
import shutil
from pathlib import Path

import pytest

from results.tools.figures import draw
from results.tools.pages import MARKED
from results.tools.study import overrides
from results.tools.verify import verify
from simbal.runs.spec import config_hash
from tests.composing import compose
from tests.conftest import CONF

RESULTS = CONF.parent / "results"
STUDIES = sorted(file.parent.name for file in RESULTS.glob("*/rows.csv"))
TO_RUN = sorted({file.parent.name for name in ("sweep.yaml", "origin.json") for file in RESULTS.glob(f"*/{name}")})
SEARCHES = {"bench_tuning"}  # its points are drawn
# the modules in which strategies stood when the studies ran: a config's hash has the path of each class
BEFORE = [
    "bias_controller.BiasController", "capacity.Capacity", "cosine.CosineRouter", "dynamic_quantile.DynamicQuantile",
    "expert_choice.ExpertChoice", "expert_overlap.ExpertOverlap", "expert_router_coupling.ExpertRouterCoupling",
    "expert_threshold.ExpertThreshold", "geometry.ErnieOrthogonalLoss", "geometry.OffDiagonalCosine",
    "geometry.RowNorm", "lbl_hf.PooledLoadBalancingLoss", "logit_norm.LogitNorm", "loss_free.LossFree",
    "none.NoBalancing", "prototype.PrototypeRouter", "quantile.QuantileBalancing", "remoe.ReMoE",
    "router_z_loss.RouterZLoss", "simbal.SimBal", "sinkhorn.Sinkhorn", "temperature.Temperature", "top_p.TopP",
]  # fmt: skip
PLACES = {place.partition(".")[2]: f"simbal.balancing.{place}" for place in BEFORE}


@pytest.fixture
def copy(tmp_path) -> Path:
    """The results of one study."""
    shutil.copytree(RESULTS / "collapse", tmp_path / "collapse")
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def hash_of_then(written):
    """The hash of a config when the studies ran."""
    targets = {name: keys["_target_"] for name, keys in written["balancing"].items()}
    old = {name: PLACES.get(target.rpartition(".")[2], target) for name, target in targets.items()}
    balancing = {name: keys | {"_target_": old[name]} for name, keys in written["balancing"].items()}
    return config_hash(written | {"balancing": balancing})


def test_every_number_of_the_results_follows_from_the_rows():
    assert len(STUDIES) >= 22
    assert verify(RESULTS) == []


def test_a_changed_digit_of_the_rows_is_found(copy):
    replace(copy / "collapse/rows.csv", "3.437920367246272", "3.437920367246273")
    assert len(verify(copy)) == 1
    replace(copy / "collapse/rows.csv", "3.437920367246273", "3.447920367246272")
    assert any("summaries val/loss mean" in sentence for sentence in verify(copy))


def test_a_changed_loss_of_a_document_is_found(copy):
    file = copy / "collapse/documents.csv"
    lines = file.read_text().splitlines()
    run, document, tokens, nats = lines[1].split(",")
    file.write_text("\n".join([lines[0], f"{run},{document},{tokens},{float(nats) + 50}", *lines[2:]]) + "\n")
    assert any("over_documents" in sentence for sentence in verify(copy))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.5860 ± 0.0650", "3.5861 ± 0.0650"),
        ("+0.1590", "+0.1591"),
        ("+0.0653 to", "+0.0654 to"),
        ("+0.1503 to", "+0.1504 to"),
        ("worse | 0.1269", "better | 0.1269"),
        ("| 0.009 | 0.037 | +2.11 | 0.003", "| 0.009 | 0.038 | +2.11 | 0.003"),
        ("in 4 of 5 seeds |", "in 3 of 5 seeds |"),
        ("-21.6%", "-21.7%"),
        ("| lbl | 5 | 0-4", "| lbl | 5 | 0-5"),
    ],
)
def test_a_changed_digit_of_table_md_is_found(copy, old, new):
    replace(copy / "collapse/table.md", old, new)
    assert len(verify(copy)) == 1


@pytest.mark.parametrize("study", ["collapse", "significance_tiny", "regimes_long", "bench_eps", "tiny_tuning"])
def test_every_changed_digit_of_a_marked_table_is_found(tmp_path, study):
    shutil.copytree(RESULTS / study, tmp_path / study)
    page = tmp_path / study / "README.md"
    text = page.read_text()
    marked = MARKED.search(text)
    columns = marked[1].split("columns: ")[1].strip().split(" | ")
    lines = [line for line in marked[2].splitlines() if line.startswith("|")][2:]
    cell = lines[-1].split("|")[1 + next(place for place, column in enumerate(columns) if column != "-")]
    for digit in re.finditer(r"\d", cell):
        changed = cell[: digit.start()] + str((int(digit[0]) + 3) % 10) + cell[digit.end() :]
        page.write_text(text.replace(lines[-1], lines[-1].replace(cell, changed, 1), 1))
        assert len(verify(tmp_path)) == 1, changed


def test_a_marked_table_that_lost_its_end_is_found(copy):
    replace(copy / "collapse/README.md", "<!-- /table -->", "")
    assert verify(copy) == ["collapse/README.md: a marked table has no end"]


def test_figures_are_drawn_from_their_numbers(tmp_path):
    for study in ("collapse", "league", "regimes"):
        drawn = tmp_path / study
        drawn.mkdir()
        shutil.copy(RESULTS / study / "curves.csv", drawn)
        draw(drawn)
        kept = {file.name: file.read_text() for file in (RESULTS / study).glob("*.svg")}
        assert {file.name: file.read_text() for file in drawn.glob("*.svg")} == kept


@pytest.mark.parametrize("study", TO_RUN)
def test_the_command_of_a_study_composes_the_runs_of_its_table(study):
    jobs = compose(["-m", *overrides(RESULTS / study)])
    assert {Path(job["folder"]).parent.name for job in jobs} == {study}
    if study in STUDIES and study not in SEARCHES:
        arms = json.loads((RESULTS / study / "table.json").read_text())["arms"]
        recorded = {run["config_hash"] for arm in arms for run in arm["runs"]}
        assert {hash_of_then(job["written"]) for job in jobs} == recorded


@pytest.mark.parametrize("study", STUDIES)
def test_its_page_shows_every_figure(study):
    page = (RESULTS / study / "README.md").read_text()
    assert [file.name for file in (RESULTS / study).glob("*.svg") if f"({file.name})" not in page] == []
    assert f"({study}/README.md)" in (RESULTS / "README.md").read_text()


def test_nothing_names_a_place_on_the_machine_that_it_was_made_on():
    places = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|work)/")
    files = [file for file in RESULTS.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert [file.name for file in files if places.search(file.read_text())] == []

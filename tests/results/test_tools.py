"""The numbers of every study follow from its rows.csv, and a single changed digit is detected."""

import json
import re
import shutil
from pathlib import Path

import pytest

from results.tools import partial
from results.tools.combine import combine
from results.tools.figures import draw
from results.tools.pages import MARKED, Pages, Study, find_pages
from results.tools.rows import read_csv, read_rows, read_table, recompute
from results.tools.study import overrides
from results.tools.verify import SUMS, check_sums, sums, verify
from tests.composing import compose
from tests.conftest import CONF

RESULTS = CONF.parent / "results"
STUDIES = sorted(file.parent.name for file in RESULTS.glob("*/rows.csv"))
PAGES = [page for page in find_pages(RESULTS) if "<!-- table" in page.read_text()]
TO_RUN = sorted({file.parent.name for name in ("sweep.yaml", "origin.json") for file in RESULTS.glob(f"*/{name}")})
# the others take more than 10 s together
TO_COMPOSE = ["collapse", *(pytest.param(study, marks=pytest.mark.slow) for study in TO_RUN if study != "collapse")]


@pytest.fixture
def copy(tmp_path) -> Path:
    """The results of one study."""
    shutil.copytree(RESULTS / "collapse", tmp_path / "collapse")
    (tmp_path / SUMS).write_text("\n".join(sums(tmp_path)))
    return tmp_path


@pytest.fixture(scope="module")
def pages() -> Pages:
    return Pages(RESULTS)


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def change_digit(text: str, place: int) -> str:
    return f"{text[:place]}{(int(text[place]) + 3) % 10}{text[place + 1 :]}"


def test_every_number_of_the_results_follows_from_the_rows():
    assert {"collapse", "league", "significance_tiny"} <= {*STUDIES}
    assert verify(RESULTS) == []


def test_a_changed_digit_of_the_rows_changes_the_numbers_of_the_tables(copy):
    replace(copy / "collapse/rows.csv", "3.437920367246272", "3.447920367246272")
    wrong = verify(copy)
    assert any("summaries val/loss mean" in sentence for sentence in wrong)
    assert any("README.md: found '| none | 3.4270" in sentence for sentence in wrong)


def test_a_changed_loss_of_a_document_is_found(copy):
    file = copy / "collapse/documents.csv"
    lines = file.read_text().splitlines()
    run, document, tokens, nats = lines[1].split(",")
    file.write_text("\n".join([lines[0], f"{run},{document},{tokens},{float(nats) + 50}", *lines[2:]]) + "\n")
    assert any("over_documents" in sentence for sentence in verify(copy))


def test_one_changed_digit_of_any_csv_file_is_found(tmp_path):
    shutil.copytree(RESULTS, tmp_path, ignore=shutil.ignore_patterns("*.svg", "*.json", "*.md"), dirs_exist_ok=True)
    assert check_sums(tmp_path) == []
    names = [line.split()[1] for line in (RESULTS / SUMS).read_text().splitlines()]
    assert {f"{study}/rows.csv" for study in STUDIES} <= {*names}
    for name in names:
        text = (tmp_path / name).read_text()
        place = [found.start() for found in re.finditer(r"\d", text)][-1]  # a column of rows.csv that no table shows
        (tmp_path / name).write_text(change_digit(text, place))
        assert {*check_sums(tmp_path)} == {f"{name} differs from {SUMS}"}
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.5860 ± 0.0650", "3.5861 ± 0.0650"),
        ("+0.1590", "+0.1591"),
        ("+0.0906 to", "+0.0907 to"),
        ("+0.1503 to", "+0.1504 to"),
        ("worse | 0.0908", "better | 0.0908"),
        ("| 0.009 | +2.11 | 0.003", "| 0.010 | +2.11 | 0.003"),
        ("in 4 of 5 seeds |", "in 3 of 5 seeds |"),
        ("| lbl | 5 | 0-4", "| lbl | 5 | 0-5"),
    ],
)
def test_a_changed_digit_of_table_md_is_found(copy, old, new):
    replace(copy / "collapse/table.md", old, new)
    assert len(verify(copy)) == 1


@pytest.mark.parametrize("page", PAGES, ids=[f"{page.parent.name}/{page.stem}" for page in PAGES])
def test_a_changed_digit_in_any_line_of_a_marked_table_is_found(pages, page):
    text, study = page.read_text(), page.parent.name
    tables = [range(table.end(1), table.start(4)) for table in MARKED.finditer(text)]
    assert tables
    every_digit = [place for table in tables for place in table if text[place].isdigit()]
    lines = {text.count("\n", 0, place): place for place in every_digit}
    digits = [*lines.values()]  # the last one of each line, which takes a tenth of the time of all
    assert digits
    assert [
        text[place - 20 : place + 20] for place in digits if not pages.check(change_digit(text, place), study)
    ] == []


def test_a_table_of_numbers_without_a_mark_is_found(copy):
    page = copy / "collapse/README.md"
    for mark in (r"<!-- table\n.*?-->\n\n", r"\n\n<!-- /table -->"):
        page.write_text(re.sub(mark, "", page.read_text(), flags=re.S))
    assert len(verify(copy)) == 6
    assert all("is not in a marked table" in sentence for sentence in verify(copy))


def test_a_marked_table_that_lost_its_end_is_found(copy):
    replace(copy / "collapse/README.md", "<!-- /table -->", "")
    assert "collapse/README.md: a marked table has no end marker" in verify(copy)


def test_an_unfilled_table_does_not_swallow_the_next_one(copy, pages):
    text = (copy / "collapse/README.md").read_text()
    unfilled = "<!-- table\n| heading |\n| {0} |\nlbl\n-->\n\n<!-- /table -->\n\n"
    assert pages.fill(unfilled + text, "collapse") == unfilled + text
    assert pages.check(unfilled + text, "collapse")[0] == "a marked table has no end marker"


def test_each_finished_run_is_appended_once_with_commit_and_processor(write_run, tmp_path):
    study = tmp_path / "study"
    study.mkdir()
    fields = {"code": {"commit": "e29cee0"}, "seconds": 61.25, "metrics": {"val/loss": 3.0, "val/max_vio": 0.5}}
    for seeds in ((0,), (0, 1)):
        paths = [write_run("lbl", seed=seed, **fields) for seed in seeds]
        for path in paths:
            (path / "metrics.jsonl").write_text('{"step": 1, "tokens": 2048, "val/loss": 4.5}\n')
        write_run("simbal", seed=7, status="failed", error="diverged")
        partial.main(paths[0].parent, study)
    rows = [*read_csv(study / "partial.csv")]
    kept = [(row["sweep"], row["balancing"], row["seed"], row["val/loss"], row["commit"]) for row in rows]
    assert kept == [("fake", "lbl", "0", "3.0", "e29cee0"), ("fake", "lbl", "1", "3.0", "e29cee0")]
    assert all("family" in row["cpu"] and row["seconds"] == "61.2" for row in rows)
    curves = [{"run": row["run"], "tokens": "2048", "val/loss": "4.5"} for row in rows]
    assert [*read_csv(study / "partial_curves.csv")] == curves


def test_combined_rows_of_machines_give_the_table_of_one(copy):
    study = copy / "collapse"
    kept = {row.arm.name: row for row in recompute(read_rows(study), read_table(study)).values()}
    lines = (study / "rows.csv").read_text().splitlines()
    ends = ["commit,cpu", *("e29cee0,one" if number % 2 else "e29cee0,another" for number in range(len(lines) - 1))]
    (study / "partial.csv").write_text("\n".join(f"{line},{end}" for line, end in zip(lines, ends, strict=True)))
    (study / "sweep.yaml").write_text("baseline: none\ncolumns: [loss, max_vio]\n")
    for name in ("documents.csv", "README.md"):  # not kept for runs of several machines
        (study / name).unlink()
    figures = {row["figure"] for row in read_csv(study / "curves.csv")}
    for _ in range(2):
        combine(study)
    assert verify(copy) == []
    rows = recompute(read_rows(study), read_table(study))
    losses = [row.summaries["val/loss"].mean for row in rows.values()]
    assert losses == sorted(losses)
    assert {name: row.summaries["val/loss"] for name, row in rows.items()} == {
        name: row.summaries["val/loss"] for name, row in kept.items()
    }
    assert rows["lbl"].differences["val/loss"].low == pytest.approx(kept["lbl"].differences["val/loss"].low)
    points = [*read_csv(study / "curves.csv")]
    assert {point["figure"] for point in points} == {*figures, "differences"}  # other figures stay
    ends = [(row["arm"], float(row["mean"]) - float(row["band"])) for row in points if row["figure"] == "differences"]
    drawn = dict(ends)
    assert len(drawn) == len(ends)
    assert drawn == {
        name: pytest.approx(row.differences["val/loss"].low) for name, row in rows.items() if name != "none"
    }


def test_arms_of_several_sweeps_are_compared_within_their_sweep(copy):
    study = copy / "collapse"
    lines = (study / "rows.csv").read_text().splitlines()
    shifted = re.sub(r",3\.(\d+),", r",4.\1,", "\n".join(lines[1:])).splitlines()
    shifted = [line.replace(",", " lr=0.01,", 1) for line in shifted]
    rows = [f"{line},{sweep}" for sweep, found in (("short", lines[1:]), ("long", shifted)) for line in found]
    (study / "partial.csv").write_text("\n".join([f"{lines[0]},sweep", *rows]))
    (study / "table.yaml").write_text("baseline: none\ncolumns: [loss]\n")
    for name in ("documents.csv", "README.md"):
        (study / name).unlink()
    combine(study)
    assert verify(copy) == []
    rows = recompute(read_rows(study), read_table(study))
    assert len(rows) == 10
    assert {row.other.name for name, row in rows.items() if row.other and "short" in name} == {"none sweep=short"}
    assert rows["lbl lr=0.01 sweep=long"].summaries["val/loss"].mean == pytest.approx(
        1 + rows["lbl sweep=short"].summaries["val/loss"].mean
    )
    cells = [line.split(" | ") for line in (study / "table.md").read_text().splitlines() if line.startswith("|")]
    assert cells[0][:3] == ["| balancing", "sweep", "lr"]
    assert len({len(row) for row in cells[:12]}) == 1
    assert cells[2][:3] == ["| simbal", "short", "—"]


def test_only_the_chosen_sweeps_are_in_the_table(tmp_path):
    study = tmp_path / "study"
    study.mkdir()
    rows = [
        f"{arm},{arm},,{seed},{sweep}-{arm}-{seed},{loss + seed / 100},{sweep}"
        for sweep, higher in (("search", 1.0), ("more", 0.5), ("final", 0.0))
        for arm, loss in (("lbl", 3.0 + higher), ("simbal", 3.1 + higher))
        for seed in (1, 2, 3)
    ]
    (study / "partial.csv").write_text("\n".join(["arm,balancing,setting,seed,run,val/loss,sweep", *rows]))
    (study / "table.yaml").write_text("baseline: lbl\ncolumns: [loss]\nsweeps: [final]\n")
    combine(study)
    assert verify(tmp_path) == []
    assert [*read_rows(study)] == ["lbl", "simbal"]
    others = Study(study / "others")
    assert {*others.arms} == {f"{arm} sweep={sweep}" for arm in ("lbl", "simbal") for sweep in ("search", "more")}
    assert others.statistics("val/loss", "simbal sweep=more", "")["mean"] == pytest.approx(3.62)


def test_treatments_are_compared_with_the_baseline_without_them(tmp_path):
    study = tmp_path / "study"
    study.mkdir()
    losses = {"lbl": 3.0, "lbl input=embedding": 2.9, "hash": 2.8}
    rows = [
        f"{arm if ' ' in arm else f'{arm} input=hidden'} vocab_size={size},{arm.split()[0]},"
        f"router.input={'embedding' if ' ' in arm else 'hidden'} data.vocab_size={size},{seed},{arm}-{size}-{seed},"
        f"{loss + seed * 0.01 * place}"
        for size in (64, 128)
        for place, (arm, loss) in enumerate(losses.items())
        for seed in (1, 2, 3)
    ]
    (study / "partial.csv").write_text("\n".join(["arm,balancing,setting,seed,run,val/loss", *rows]))
    (study / "table.yaml").write_text("baseline: lbl\ncolumns: [loss]\ntreatments: {router.input: hidden}\n")
    combine(study)
    assert verify(tmp_path) == []
    found = recompute(read_rows(study), read_table(study))
    compared = {name: row.other.name for name, row in found.items() if row.other}
    assert compared == {
        f"{arm} vocab_size={size}": f"lbl vocab_size={size}"
        for size in (64, 128)
        for arm in ("lbl input=embedding", "hash")
    }


def test_figures_are_drawn_from_their_numbers(tmp_path):
    studies = sorted(file.parent.name for file in RESULTS.glob("*/curves.csv"))
    assert {"collapse", "league", "significance_tiny"} <= {*studies}
    for study in studies:
        drawn = tmp_path / study
        drawn.mkdir()
        shutil.copy(RESULTS / study / "curves.csv", drawn)
        draw(drawn)
        kept = {file.name: file.read_text() for file in (RESULTS / study).glob("*.svg") if file.stem != "crossover"}
        assert {file.name: file.read_text() for file in drawn.glob("*.svg")} == kept


@pytest.mark.parametrize("study", TO_COMPOSE)
def test_the_command_of_a_study_composes_the_runs_of_its_table(study):
    jobs = compose(["-m", *overrides(RESULTS / study)])
    assert {Path(job["folder"]).parent.name for job in jobs} == {study}
    if study in STUDIES:
        arms = json.loads((RESULTS / study / "table.json").read_text())["arms"]
        # strategies and seeds: the rest of a name changes with the version
        folders = [*(run["folder"] for arm in arms for run in arm["runs"])]
        ours, theirs = (
            sorted(re.sub(r"-.*-seed", "-seed", Path(folder).name[:-9]) for folder in each)
            for each in ((job["folder"] for job in jobs), folders)
        )
        assert ours == theirs


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_of_a_study_shows_every_figure(study):
    page = (RESULTS / study / "README.md").read_text()
    assert [file.name for file in (RESULTS / study).glob("*.svg") if f"({file.name})" not in page] == []
    assert f"({study}/README.md)" in (RESULTS / "README.md").read_text()


def test_no_file_names_a_path_on_the_machine_that_ran_the_study():
    places = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|work)/")
    files = [file for file in RESULTS.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert [file.name for file in files if places.search(file.read_text())] == []

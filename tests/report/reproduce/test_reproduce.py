"""The studies behind results/: what is asked for, what is kept of it, and that figures can be drawn from that alone."""

import csv
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hydra import compose, initialize_config_dir

from simbal.analysis.shared.finding import write_analysis
from simbal.config.check import resolved
from simbal.errors import UserError
from simbal.report.page.styles import KNOWN, MOST_ARMS
from simbal.report.reproduce import drawing
from simbal.report.reproduce import reproduce as reproducing
from simbal.report.reproduce.check_table import check_table
from simbal.report.reproduce.evidence import Study, studies, write
from simbal.report.reproduce.kept import RUNS, bring_back
from simbal.report.reproduce.rows import baseline_of, read_rows
from simbal.runs.folder import RunFolder
from tests import programs
from tests.conftest import CONF

RECORD = {
    "code": {"version": "1", "commit": "abc", "dirty": False}, "seconds": 10.0,
    "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:10+00:00",
}  # fmt: skip


def config(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolved(compose("reproduce", [*overrides]))


def curve(run: Path, losses: list[float]) -> None:
    rows = [{"step": i, "tokens": 100 * i, "val/loss": loss, "val/ppl": 2.0} for i, loss in enumerate(losses)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def study(write_run) -> Study:
    for balancing, losses in {"lbl": [4.0, 3.0, 2.0], "simbal": [4.0, 2.0, 1.0]}.items():
        for seed in (0, 1):
            curve(write_run(balancing, seed, **RECORD), [loss + seed for loss in losses])
    folder = write_run("none", 0, status="failed", error="the disk was full").parent
    return Study("significance", ["x=1"], [], ["ppl"], folder)


def test_studies_are_chosen_by_name_and_an_unknown_one_is_refused():
    names = {study.name for study in studies(config("scale=cpu"))}
    assert {"significance_tiny", "collapse"} < names
    assert [study.name for study in studies(config("scale=cpu", "only=[collapse]"))] == ["collapse"]
    with pytest.raises(UserError, match="only=collapsed is no study of scale=cpu: there are regimes_middle,"):
        studies(config("scale=cpu", "only=[collapsed]"))


def test_evidence_names_its_runs_commit_and_failures_and_keeps_what_people_wrote(study, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    (results / "README.md").write_text("read by a person")
    write(study, "python train.py", results)
    origin = json.loads((results / "origin.json").read_text())
    assert (origin["runs"], origin["finished"], origin["seconds"]) == (5, 4, 40)
    assert origin["code"] == [RECORD["code"]]
    assert "the disk was full" in (results / "table.md").read_text()
    assert (results / "README.md").read_text() == "read by a person"
    with (results / "curves.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["figure"] == "loss" and row["arm"] == "simbal"]
    assert [(row["x"], row["mean"]) for row in rows] == [("0", "4.5"), ("100", "2.5"), ("200", "1.5")]
    assert {(float(row["band"]), row["rival"]) for row in rows} == {(0, "lbl")}  # both seeds differ by the same


def test_a_table_compares_with_the_baseline_of_its_study_where_that_names_one(study, tmp_path):
    for baseline, rivals in {None: {"lbl"}, "simbal": {"simbal"}}.items():
        write(replace(study, baseline=baseline), "python train.py", tmp_path)
        assert baseline_of(tmp_path) == (baseline or "lbl")
        rows = csv.DictReader((tmp_path / "curves.csv").read_text().splitlines())
        assert {row["rival"] for row in rows} - {""} == rivals


def test_evidence_names_files_without_the_folders_of_one_machine(write_run, tmp_path):
    data = {"source": {"name": "files", "files": [["train", "/home/a/books.txt", 3, 4]]}, "tokens": "b"}
    run = write_run("lbl", **RECORD, data=data)
    curve(run, [2.0, 1.0])
    write(Study("s", [], [], ["ppl"], run.parent), "python train.py", tmp_path / "results")
    (environment,) = json.loads((tmp_path / "results/origin.json").read_text())["environment"]
    assert environment["data"]["source"]["files"] == [["train", "books.txt", 3, 4]]


def finished(study: Study) -> list[Path]:
    """Two of lbl, then two of simbal."""
    return sorted(run for run in study.folder.iterdir() if not run.name.startswith("none"))


def analyse(run: Path, value: float, tokens: int = 8, trained: str = "32-true") -> None:
    """What an analysis leaves in a run's folder."""
    found = {
        "settings": {"tokens": tokens}, "definition": {"pes": "how *alike*"}, "metrics": {"pes": value, "none": None},
        "layers": {"pes": [value, 2 * value], "loads": [[1, 2], [3, 4]]},
        "precision": {"trained": trained, "analysed": "32-true"},
    }  # fmt: skip
    write_analysis(run / "analysis" / "redundancy.json", found)


def test_numbers_of_analyses_are_means_over_seeds_of_the_model_and_of_each_layer(study, tmp_path):
    for place, run in enumerate(finished(study)):
        analyse(run, value=place)
    write(study, "python train.py", tmp_path)
    with (tmp_path / "analyses.csv").open() as file:
        rows = {(row["arm"], row["layer"]): row for row in csv.DictReader(file)}
    assert {key: float(row["mean"]) for key, row in rows.items()} == {
        (arm, layer): times * mean
        for arm, mean in (("lbl", 0.5), ("simbal", 2.5))
        for layer, times in (("", 1), ("0", 1), ("1", 2))
    }
    assert {(row["n"], round(float(row["sd"]), 4)) for row in rows.values()} == {("2", 0.7071), ("2", 1.4142)}
    text = (tmp_path / "analyses.md").read_text()
    assert "| pes | 0.5 ± 0.7071 | 2.5 ± 0.7071 |" in text
    assert "| pes | simbal | 2.5 ± 0.7071 | 5 ± 1.414 |" in text
    assert "- pes: how \\*alike\\*" in text


@pytest.mark.parametrize(("trained", "said"), [("32-true", False), ("bf16-true", True)])
def test_an_analysis_in_another_precision_than_the_training_says_so(study, tmp_path, trained, said):
    for run in finished(study):
        analyse(run, 1.0, trained=trained)
    write(study, "python train.py", tmp_path)
    assert ("\n- trained in bf16-true, analysed in 32-true\n" in (tmp_path / "analyses.md").read_text()) is said


def test_rows_have_every_number_of_every_run_and_the_table_follows_from_them(study, tmp_path):
    for place, run in enumerate(finished(study)):
        analyse(run, value=place / 3)
    write(study, "python train.py", tmp_path)
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"]) for row in rows] == [("lbl", "0"), ("lbl", "1"), ("simbal", "0"), ("simbal", "1")]
    assert [float(row["redundancy.pes"]) for row in rows] == [0, 1 / 3, 2 / 3, 1]  # in full precision
    assert {run.name for run in finished(study)} == {row["run"] for row in rows}
    record = RunFolder(finished(study)[0]).read_record()
    assert record is not None
    assert {key: rows[0][key] for key in record["metrics"]} == {k: str(v) for k, v in record["metrics"].items()}
    model = RunFolder(finished(study)[0]).read_spec().config.model
    size = model.num_experts * 3 * model.d_model * model.d_expert
    assert float(rows[0]["tokens_per_expert_parameter"]) == record["tokens"] * model.top_k / size > 0
    assert [row["tokens_to_loss"] for row in rows] == ["", "", "0.5", "0.5"]  # the loss of lbl's 200 tokens after 100
    checked = check_table(tmp_path)
    assert checked.wrong == []
    assert checked.verified > 8


def test_tests_and_intervals_of_a_table_are_those_that_another_library_finds_in_its_rows(write_run, tmp_path):
    drawn = Random(0)
    for balancing in ("lbl", "simbal", "none"):
        for seed in range(5):
            loss = 3 + drawn.random()
            numbers = {"val/loss": loss, "val/ppl": math.exp(loss), "val/max_vio": drawn.random()}
            run = write_run(balancing, seed, metrics=numbers, **RECORD)
            curve(run, [4.0, 3.5, loss])
    write(Study("s", [], [], ["ppl", "max_vio"], run.parent), "python train.py", tmp_path / "results")
    checked = check_table(tmp_path / "results")
    assert checked.wrong == []
    assert checked.verified > 50  # 15 of means, 32 of differences, and those of tokens


def test_a_loss_that_is_there_at_the_start_is_no_loss_that_is_never_reached(write_run, tmp_path):
    for balancing, losses in {"lbl": [4.0, 3.0], "simbal": [3.0, 2.0], "none": [5.0, 4.0]}.items():
        folder = write_run(balancing, 0, **RECORD)
        curve(folder, losses)
    write(Study("s", [], [], ["ppl"], folder.parent), "python train.py", tmp_path / "results")
    arms = {arm.name: arm.by_seed[0].get("tokens_to_loss") for arm in read_rows(tmp_path / "results") or []}
    assert arms == {"lbl": None, "none": math.inf, "simbal": 0.0}


def test_analyses_with_other_settings_are_not_averaged(study, tmp_path):
    for place, run in enumerate(finished(study)):
        analyse(run, value=1.0, tokens=place)
    with pytest.raises(UserError, match="redundancy was done with other settings"):
        write(study, "python train.py", tmp_path)


def test_figures_are_drawn_again_from_the_results_alone_to_the_byte(study, tmp_path):
    results = tmp_path / "results"
    write(study, "python train.py", results)
    shutil.rmtree(study.folder)
    before = {file.name: file.read_bytes() for file in results.glob("*.svg")}
    assert {"loss.svg", "loss-late.svg"} >= before.keys() >= {"loss.svg"}
    for name in before:
        (results / name).unlink()
    drawing.draw(results)
    assert {file.name: file.read_bytes() for file in results.glob("*.svg")} == before


def test_of_more_arms_than_lines_can_show_each_has_its_difference_in_loss(write_run, tmp_path):
    arms = KNOWN[: MOST_ARMS + 1]
    for place, balancing in enumerate(arms):
        for seed in (0, 1):
            loss = 3 - place * (0.1 + 0.02 * seed)
            folder = write_run(balancing, seed, metrics={"val/loss": loss, "val/ppl": math.exp(loss)}, **RECORD).parent
    found = written(folder, tmp_path / "all")
    assert {row["arm"]: float(row["mean"]) for row in found} == pytest.approx(
        {balancing: -0.11 * place for place, balancing in enumerate(arms) if place}
    )
    assert [row["arm"] for row in found] == [*reversed(arms[1:])], "the lowest first"
    assert {row["rival"] for row in found} == {"lbl"}
    assert [float(row["band"]) for row in found][-1] == pytest.approx(12.706 * 0.01, rel=1e-4)  # Student's t of 1
    assert (tmp_path / "all/differences.svg").exists()
    for run in folder.glob(f"{arms[-1]}-*"):
        shutil.rmtree(run)
    assert written(folder, tmp_path / "fewer") == [], "lines show so many"


def written(folder: Path, results: Path) -> list[dict[str, str]]:
    write(Study("s", [], [], ["loss"], folder), "python train.py", results)
    rows = csv.DictReader((results / "curves.csv").read_text().splitlines())
    return [row for row in rows if row["figure"] == drawing.DIFFERENCES]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no .*: reproduce the study first"),
        ("figure,arm\nloss,a\n", "does not hold the curves"),
        ("figure,arm,style,x,mean,band,rival\nloss,a,0,x,1,\n", "does not hold the curves"),
        ("figure,arm,style,x,mean,band,rival\nother,a,0,1,1,\n", "a figure 'other', which is not known"),
    ],
)
def test_a_broken_file_of_curves_is_a_sentence(tmp_path, content, says):
    if content is not None:
        (tmp_path / "curves.csv").write_text(content)
    with pytest.raises(UserError, match=says):
        drawing.draw(tmp_path)


@pytest.fixture
def started(monkeypatch, write_run, tmp_path):
    """The commands that are started, in order; none is, but what they leave behind is there."""
    given: list[list[str]] = []

    def run(command, stdout, check):
        program, *arguments = command[command.index("simbal.cli.main") + 1 :]
        given.append([program, *arguments])
        if program == "train":
            run = write_run("lbl", **RECORD, keys={"name": "smoke-significance"})
            curve(run, [2.0, 1.0])
            (run.parent / "table.json").write_text("{}")
        if stdout:
            Path(arguments[-1].removeprefix("output_dir=")).mkdir(parents=True, exist_ok=True)
            stdout.write("what it prints\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproducing.subprocess, "run", run)
    return given


def test_a_scale_is_done_by_the_commands_that_it_says_and_drawn_again_by_none(started, tmp_path, capsys):
    made = config("scale=smoke")
    made["scale"]["studies"]["significance"]["columns"] = ["ppl"]
    reproducing.reproduce(made)
    results = tmp_path / "outputs/smoke"
    [study] = studies(made)
    assert started == [
        ["train", "-m", *study.overrides],
        ["evaluate", "run=outputs/smoke-significance", "analysis=[orthogonality]"],
        ["evaluate", "analysis=gram_quanta", "output_dir=outputs/smoke/gram_quanta"],
    ]
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("python ")]
    assert said == ["written: outputs/smoke/significance", "written: outputs/smoke/gram_quanta"]
    printed = (results / "gram_quanta/printed.txt").read_text()
    assert printed == f"$ python evaluate.py {' '.join(started[2][1:])}\n\nwhat it prints\n"
    before = (results / "significance/loss.svg").read_bytes()
    (results / "significance/loss.svg").unlink()
    reproducing.reproduce(made | {"figures": True})
    assert (results / "significance/loss.svg").read_bytes() == before
    reproducing.reproduce(made)
    origin = json.loads((results / "significance/origin.json").read_text())
    (results / "significance/origin.json").write_text(json.dumps(origin | {"seconds": 9000}))
    ended = sorted(study.folder.glob("*/record.json"))
    shutil.rmtree(ended[0].parent)
    reproducing.reproduce(made)
    (results / "significance" / RUNS).unlink()
    (results / "significance/origin.json").write_text(json.dumps(origin | {"seconds": 9000}))
    shutil.rmtree(ended[0].parent)
    reproducing.reproduce(made)
    took = "1 of 1 studies took 1M tokens and {} hours of runs, several at once, when outputs/smoke was made; "
    lines = [line for line in capsys.readouterr().out.splitlines() if " studies took " in line]
    part = f"some {2.5 / len(ended):.1f} hours are left"
    none = "some 0.0 hours are left"
    assert lines == [took.format("0.0") + none, took.format("2.5") + none, took.format("2.5") + part]
    del started[3:]
    shutil.rmtree(results)
    (results / "significance").mkdir(parents=True)
    (results / "significance/plan.md").write_text("It is there before the runs.")
    reproducing.reproduce(made | {"figures": True})
    assert capsys.readouterr().out == "left out: significance, which has not been reproduced\n"
    assert len(started) == 3


@pytest.mark.parametrize(("code", "says"), [(0, "has left no table"), (1, "has left no table"), (2, "exit code 2")])
def test_a_command_that_failed_is_a_sentence(monkeypatch, tmp_path, code, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproducing.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
    with pytest.raises(UserError, match=f"^python train.py -m .* {says}"):
        reproducing.reproduce(config("scale=smoke"))


def test_what_is_finished_is_kept_when_the_rest_is_interrupted(started, monkeypatch, tmp_path):
    train = reproducing.subprocess.run

    def interrupted(*args, **keys):
        train(*args, **keys)
        raise KeyboardInterrupt

    monkeypatch.setattr(reproducing.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproducing.reproduce(config("scale=smoke"))
    assert bring_back(tmp_path / "outputs/smoke/significance", tmp_path / "elsewhere") == 1


@pytest.mark.slow  # processes: four runs and their analyses
def test_the_command_does_what_is_left_and_says_what_it_does(tmp_path, monkeypatch, capsys):
    first = programs.run("reproduce.py", "scale=smoke", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "python train.py -m model=tiny" in first.stdout
    results = tmp_path / "outputs/smoke"
    files = {str(file.relative_to(results)) for file in results.rglob("*.*")}
    assert {"significance/table.md", "significance/loss.svg", "significance/origin.json"} <= files
    assert {"gram_quanta/analysis/gram_quanta.json", "significance/analyses.md"} <= files
    printed = (results / "gram_quanta/printed.txt").read_text()
    assert printed.startswith("$ python evaluate.py analysis=gram_quanta output_dir=outputs/smoke/gram_quanta\n")
    assert "layer" in printed
    before = (results / "significance/rows.csv").read_bytes()
    shutil.rmtree(tmp_path / "outputs/smoke-significance")  # as on another machine

    def forked(command, stdout, check):  # in place of a Python that is started anew
        program, *arguments = command[command.index("simbal.cli.main") + 1 :]
        done = programs.run(f"{program}.py", *arguments, cwd=tmp_path)
        print(done.stdout)
        return done

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproducing.subprocess, "run", forked)
    reproducing.reproduce(config("scale=smoke", "only=[significance]"))
    elsewhere = capsys.readouterr().out
    assert "4 runs from outputs/smoke/significance/runs.tar.xz\n" in elsewhere
    assert "4 finished, 0 resumed, 0 new" in elsewhere
    assert (results / "significance/rows.csv").read_bytes() == before

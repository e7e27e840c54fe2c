"""A plan that was committed after its study's first run is found, and what git cannot know is said."""

import json
import shutil
import subprocess

import pytest

from simbal.errors import UserError
from simbal.report.reproduce.plans import check_plan
from simbal.report.reproduce.verify import verify
from tests.report.reproduce.test_verify import RESULTS

STARTED = "2026-03-02T12:00:00+00:00"


def git(folder, *arguments, date=STARTED):
    names = {f"GIT_{role}_{key}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    environment = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null", **names, **dates}
    subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """`repository(date)`: the folder of a study whose plan was committed then, in a repository."""

    def make(date):
        study = tmp_path / "kept" / "results" / "study"
        study.mkdir(parents=True)
        (study / "plan.md").write_text("We ask whether it rains.\n")
        (study / "origin.json").write_text(json.dumps({"first_started": STARTED}))
        git(tmp_path / "kept", "init")
        git(study, "add", "plan.md")
        git(study, "commit", "-m", "A plan", date=date)
        return study

    return make


@pytest.mark.parametrize(
    ("date", "late"),
    [
        ("2026-03-02T11:59:59+00:00", False), ("2026-03-02T12:30:00+01:00", False),
        (STARTED, True), ("2026-03-02T11:30:00-01:00", True),
    ],
)  # fmt: skip
def test_the_first_commit_of_a_plan_is_held_against_the_first_run(repository, date, late):
    said, wrong = check_plan(repository(date))
    assert wrong is late
    assert said.startswith("WRONG: committed at" if late else "committed before")


def test_neither_a_new_name_nor_a_later_change_makes_a_plan_younger(repository):
    study = repository("2026-03-01T12:00:00+00:00")
    git(study, "mv", "plan.md", "old.md", date="2026-03-03T12:00:00+00:00")
    git(study, "commit", "-m", "Another name", date="2026-03-03T12:00:00+00:00")
    git(study, "mv", "old.md", "plan.md")
    (study / "plan.md").write_text("We ask whether it rains. Added: or snows.\n")
    git(study, "commit", "-am", "More", date="2026-03-04T12:00:00+00:00")
    assert check_plan(study) == ("committed before the first run began", False)


def test_where_git_does_not_know_nothing_is_claimed(repository, tmp_path):
    study = repository("2026-03-05T12:00:00+00:00")
    git(study, "commit", "--allow-empty", "-m", "More")
    git(tmp_path, "clone", "--depth=1", f"file://{tmp_path / 'kept'}", "shallow")
    shallow = tmp_path / "shallow" / "results" / "study"
    (shallow / "origin.json").write_text((study / "origin.json").read_text())
    unknown = ("not verified, as git does not know its first commit here", False)
    assert check_plan(shallow) == unknown
    (study.parent / "other").mkdir()
    for name in ("plan.md", "origin.json"):
        (study.parent / "other" / name).write_text((study / name).read_text())
    assert check_plan(study.parent / "other") == unknown


def test_verifying_fails_at_a_late_plan_and_at_an_origin_without_a_date(repository, capsys):
    study = repository("2026-03-05T12:00:00+00:00")
    for name in ("table.json", "table.md", "rows.csv"):
        shutil.copy(RESULTS / "collapse" / name, study)
    with pytest.raises(UserError, match="results has 1 of its plans younger than their runs: see above"):
        verify(study.parent)
    assert "study/plan.md: WRONG: committed at 2026-03-05T12:00:00+00:00" in capsys.readouterr().out
    (study / "origin.json").write_text("{}")
    with pytest.raises(UserError, match="origin.json does not say when the first run began"):
        verify(study.parent)


def test_a_plan_without_results_is_no_mistake(tmp_path):
    (tmp_path / "plan.md").touch()
    assert check_plan(tmp_path) == ("its study has no origin.json to hold it against", False)


@pytest.mark.parametrize(("started", "late"), [(STARTED, False), ("2026-02-28T12:00:00+00:00", True)])
def test_a_plan_of_several_studies_is_held_against_the_first_run_of_any(repository, started, late):
    study = repository("2026-03-01T12:00:00+00:00")
    (study / "origin.json").unlink()
    for name, first in (("study_short", STARTED), ("study_long", started), ("studying", "2026-01-01T00:00:00+00:00")):
        (study.parent / name).mkdir()
        (study.parent / name / "origin.json").write_text(json.dumps({"first_started": first}))
    assert check_plan(study)[1] is late

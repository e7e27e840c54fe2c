"""The commit in a record is that of simbal's own checkout."""

import subprocess

import pytest

from simbal.training import record

GIT = ("git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.org")


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit, in which an environment lies that is not tracked."""
    (tmp_path / "tracked.py").write_text("")
    for arguments in (["init", "-q"], ["add", "tracked.py"], ["commit", "-qm", "a commit"]):
        subprocess.run([*GIT, *arguments], cwd=tmp_path, check=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/record.py").write_text("")
    return tmp_path


def test_it_is_the_one_of_the_files_that_run(repository, monkeypatch):
    monkeypatch.setattr(record, "__file__", str(repository / "tracked.py"))
    found = record.code_version()
    assert len(found["commit"]) == 40
    assert found["dirty"] is True  # .venv is not ignored there


def test_an_installed_package_has_none_even_if_its_environment_lies_in_another_repository(repository, monkeypatch):
    monkeypatch.setattr(record, "__file__", str(repository / ".venv/record.py"))
    assert (record.code_version()["commit"], record.code_version()["dirty"]) == (None, None)

"""An archive has the runs as they were, and tar brings them back."""

import tarfile

import pytest

from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.runs.archive import write_archive


def test_runs_come_back_as_they_were(write_run, tmp_path):
    runs = [write_run(seed=0), write_run(seed=1)]
    assert write_archive([runs[0].parent], tmp_path / "runs.tar.gz") == 2
    with tarfile.open(tmp_path / "runs.tar.gz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    before, after = collect(runs[0].parent), collect(tmp_path / "back" / "fake")
    assert [(run.path.name, run.record) for run in before] == [(run.path.name, run.record) for run in after]


def test_two_runs_of_one_name_in_different_places_are_refused(write_run, tmp_path):
    run = write_run()
    other = tmp_path / "elsewhere" / "fake" / run.name
    other.parent.mkdir(parents=True)
    run.rename(other)
    with pytest.raises(UserError, match=f"would be fake/{run.name} in the archive"):
        write_archive([write_run(), other], tmp_path / "runs.tar.gz")
    assert not (tmp_path / "runs.tar.gz").exists()

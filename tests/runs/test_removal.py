"""Only folders of runs are deleted, whole, and none that a process is at."""

import pytest

from simbal.errors import BusyError, UserError
from simbal.report.collect import collect
from simbal.runs import folder
from simbal.runs.folder import RunFolder, delete_runs, run_folders


def test_runs_are_deleted_and_nothing_else(write_run):
    kept, gone = write_run(seed=0), write_run(seed=1)
    (kept.parent / "table.md").write_text("a table")
    delete_runs(run_folders([gone]))
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted([kept.name, "table.md"])


@pytest.mark.parametrize("what", ["nowhere", "empty", "of_others", "link", "sweep_with_link"])
def test_what_is_no_run_is_refused(write_run, tmp_path, what):
    run = write_run()
    (tmp_path / "empty").mkdir()
    (tmp_path / "of_others").mkdir()
    (tmp_path / "of_others" / "config.yaml").write_text("theme: dark\n")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "sweep_with_link").mkdir()
    (tmp_path / "sweep_with_link" / "run").symlink_to(run)
    with pytest.raises(UserError, match=what):
        run_folders([tmp_path / what])
    assert run.is_dir()


def test_links_in_a_run_are_not_followed(write_run, tmp_path):
    run, precious = write_run(), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (run / "link").symlink_to(precious)
    delete_runs([run])
    assert not run.exists()
    assert (precious / "file").read_text() == "kept"


def test_nothing_is_deleted_if_one_of_the_runs_is_being_trained(write_run):
    runs = [write_run(seed=0), write_run(seed=1)]
    with RunFolder(runs[1]).lock(), pytest.raises(BusyError, match=f"{runs[1]} is being trained"):
        delete_runs(runs)
    assert all(run.is_dir() for run in runs)


def test_a_kill_leaves_no_half_of_a_run_and_the_next_deletion_removes_the_rest(write_run, monkeypatch):
    kept, gone, later = (write_run(seed=seed) for seed in range(3))

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_runs([gone])
    assert not gone.exists()
    assert {run.path for run in collect(kept.parent)} == {kept, later}
    delete_runs([later])
    assert [*kept.parent.iterdir()] == [kept]

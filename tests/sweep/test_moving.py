"""A sweep under another name goes on as if it had always had it."""

import json

import pytest

from simbal.errors import BusyError, UserError
from simbal.files.locks import Lock
from simbal.report.collect import collect
from simbal.runs.folder import RunFolder
from simbal.sweep import moving
from simbal.sweep.composer import Job
from simbal.sweep.moving import move_sweep
from simbal.sweep.resume import plan, write_sweep_json
from simbal.sweep.search import run
from tests.run_folders import changed_spec
from tests.sweep.search.in_process import SearchHere, results


def move(source, target):
    return [*move_sweep(source, target)]


def test_its_runs_are_found_by_the_new_name(base_spec, write_run):
    path = write_run()
    spec = RunFolder(path).read_spec()
    move(path.parent, path.parent.with_name("new"))
    keys = {"name": "new", "output_dir": str(path.parent.parent), "balancing": spec.written["balancing"]}
    renamed = changed_spec(base_spec, keys, balancing="simbal")
    (attempt,) = plan([Job([], renamed)], retry_failed=False)
    assert attempt.kind == "finished"
    (found,) = collect(path.parent.with_name("new"))
    assert (found.path.name, found.finished) == (path.name, True)
    assert not path.parent.exists()


def test_the_command_of_its_sweep_gets_the_new_name(write_run, tmp_path, monkeypatch):
    folder = write_run().parent
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "-m", "name=fake", "seed=0-4"])
    write_sweep_json(folder, {"a": "seed=0"})
    said = move(folder, folder.with_name("new"))
    assert said[-1] == "goes on by: train.py -m seed=0-4 name=new"
    assert json.loads((folder.with_name("new") / "sweep.json").read_text())["runs"] == {"a": "seed=0"}
    said = move(folder.with_name("new"), tmp_path / "kept" / "new")
    assert said[-1] == f"goes on by: train.py -m seed=0-4 name=new output_dir={tmp_path / 'kept'}"


def test_a_command_that_no_shell_would_take_stays(write_run):
    folder = write_run().parent
    (folder / "sweep.json").write_text(json.dumps({"command": "train.py 'name=", "runs": {}}))
    assert len(move(folder, folder.with_name("new"))) == 1


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """A search of three trials that is done, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "report", lambda *_: None)
    search = SearchHere(tmp_path)
    search.run()
    return search


def test_its_study_goes_on_with_what_it_has_found(searched, tmp_path):
    before, launched = results(searched.study()), len(searched.launcher.launched)
    said = move(tmp_path / "outputs/s", tmp_path / "outputs/t")
    assert "its study s is t now" in said
    out = searched.run("name=t", n_trials=4)
    assert "3 of 4 trials done" in out
    assert "are not here" not in out
    after = results(searched.study_named("t", tmp_path / "outputs/t/study.db"))
    assert [trial[:3] for trial in after[:3]] == [trial[:3] for trial in before]
    assert [path for trial in after for path in trial[3]] == [
        str(path).replace("outputs/s/", "outputs/t/") for path in searched.launcher.launched
    ]
    assert len(searched.launcher.launched) == launched + 2


def test_what_a_kill_has_left_undone_the_same_command_does(searched, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moving, "_rename_studies", killed)
        with pytest.raises(KeyboardInterrupt):
            move(tmp_path / "outputs/s", tmp_path / "outputs/t")
    assert "its study s is t now" in move(tmp_path / "outputs/s", tmp_path / "outputs/t")
    assert "3 of 3 trials done" in searched.run("name=t")


def test_a_study_in_another_place_is_said_to_keep_its_name(searched, tmp_path):
    searched.study_file.rename(tmp_path / "mine.db")
    (tmp_path / "outputs/s/sweep.json").unlink()
    said = move(tmp_path / "outputs/s", tmp_path / "outputs/t")
    assert any("hydra.sweeper.study_name=s" in sentence for sentence in said)


def test_nobody_loses_a_folder_that_he_works_in(searched, tmp_path):
    (path, *_) = searched.launcher.launched
    with RunFolder(path).lock(), pytest.raises(BusyError, match="is being trained"):
        move(tmp_path / "outputs/s", tmp_path / "outputs/t")
    lock = next((tmp_path / "outputs/s").glob(".study.db-*.lock"))
    with Lock(lock).held(), pytest.raises(BusyError, match="a search is at the study"):
        move(tmp_path / "outputs/s", tmp_path / "outputs/t")
    assert path.is_dir()


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("nowhere", "new", "is no folder"), ("link", "new", "is a link"), ("empty", "new", "holds no runs"),
        ("outputs/fake", "empty", "is there already"), ("outputs/fake", ".new", "must be a plain name"),
        ("outputs/fake", "outputs/fake/new", "cannot become"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_stays(write_run, tmp_path, source, target, said):
    path = write_run()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(path.parent)
    with pytest.raises(UserError, match=said):
        move(tmp_path / source, tmp_path / target)
    assert path.is_dir()


def test_a_run_alone_is_not_moved(write_run, tmp_path):
    with pytest.raises(UserError, match="is a run, whose folder has its name"):
        move(write_run(), tmp_path / "new")

"""Where a study is kept, what a broken or unreachable place says, and that no password is ever written."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import psycopg2
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from simbal.errors import BUSY, BusyError, UserError
from simbal.sweep.search import run
from simbal.sweep.search.storage import DamagedStudyError, StudyStorage
from tests.sweep.search.app import COEF, SearchApp
from tests.sweep.search.in_process import SearchHere

SERVER_PROGRAMS = Path("/usr/lib/postgresql")
NOBODY = 65534
PASSWORD = "aVery/@:%?#&'\"\\ ;$üSecret"


@pytest.fixture
def app(tmp_path):
    return SearchApp(tmp_path)


def journal(file):
    return JournalStorage(JournalFileBackend(str(file)))


def test_an_unnamed_study_is_kept_in_memory(app):
    assert "study default in memory: 0 of 1" in app.run(COEF, "hydra.sweeper.n_trials=1").stdout
    assert not (app.folder / "outputs/default/study.db").exists()


def test_a_study_name_alone_keeps_it(app):
    app.run(COEF, "hydra.sweeper.n_trials=1", "hydra.sweeper.study_name=mine")
    assert len(app.study("mine", f"sqlite:///{app.folder}/outputs/default/study.db").trials) == 1


def test_a_journal_goes_on_after_a_kill(app):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.storage=journal:s.log")
    app.behave(hang_after=1)
    app.kill(app.start(*how), jobs=2)
    app.behave()
    again = app.run(*how)
    assert again.returncode == 0, again.stderr
    assert "study s in journal:s.log: 1 of 3 trials done, 2 to run" in again.stdout
    trials = app.study(storage=journal(app.folder / "s.log")).trials
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) == 3
    assert len({job["coef"] for job in app.started}) == 3


def test_trials_of_another_machine_are_left_alone_until_they_are_taken_over(app):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=2", "hydra.sweeper.storage=journal:s.log")
    app.run(*how, "hydra.sweeper.n_trials=1")
    study = app.study(storage=journal(app.folder / "s.log"))
    trial = study.ask()
    trial.set_user_attr("host", "elsewhere")
    trial.suggest_float("balancing.simbal.coef", 1e-3, 10, log=True)
    left = app.run(*how)
    assert "1 running on elsewhere (if not any more: hydra.sweeper.take_over=true)" in left.stdout
    assert len(app.started) == 1
    app.run(*how, "hydra.sweeper.take_over=true")
    assert app.started[1]["coef"] == trial.params["balancing.simbal.coef"]


def test_two_sweeps_do_not_share_a_study(app):
    app.behave(hang_after=0)
    first = app.start("name=s", COEF, "hydra.sweeper.n_trials=2")
    app.wait_until(lambda: len(app.started) >= 1)
    second = app.run("name=s", COEF, "hydra.sweeper.n_trials=2")
    first.terminate()
    first.communicate()
    assert second.returncode == BUSY
    said = f"error: the study s in sqlite:///outputs/s/study.db is being run by process {first.pid} on "
    assert second.stderr.startswith(said)
    assert len(app.study().trials) <= 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["hydra.sweeper.directions=[maximize]"], "has other directions: directions=minimize, not directions=maximize"),
        (
            ["balancing.simbal.coef=interval(1,2)"],
            "has other search space: balancing.simbal.coef=tag(log,interval(0.001",
        ),
        (["optim.lr=1e-2"], "has other keys: optim.lr=0.002, not optim.lr=0.01;"),
        (["model=small"], 'model="tiny", not model="small"'),
        (["seed=3"], "has other keys: seed=0, not seed=3;"),
        (["seed=0-1"], "has other replicates: "),
    ],
)
def test_a_study_of_something_else_is_refused(app, change, sentence):
    app.run("name=s", COEF, "hydra.sweeper.n_trials=1")
    other = app.run("name=s", COEF, "hydra.sweeper.n_trials=1", *change)
    assert other.returncode == 1
    assert other.stderr.startswith("error: the study s ")
    assert sentence in other.stderr
    assert len(app.started) == 1


def test_a_search_does_not_go_on_with_a_file_that_says_something_else_now(app):
    (app.folder / "sweeps").mkdir()
    file = app.folder / "sweeps" / "mine.yaml"
    text = "# @package _global_\ndefaults: [override /hydra/sweeper: optuna]\nname: s\noptim: {{warmup_steps: {}}}\n"
    how = (f"--config-dir={app.folder}", "sweeps=mine", COEF, "hydra.sweeper.n_trials=2")
    file.write_text(text.format(40))
    assert app.run(*how, "hydra.sweeper.n_trials=1").returncode == 0
    file.write_text(text.format(50))
    other = app.run(*how)
    assert "has other keys: optim.warmup_steps=40, not optim.warmup_steps=50;" in other.stderr
    file.write_text(text.format(40))
    assert app.run(*how).returncode == 0
    assert len(app.started) == 2


def as_of_an_older_version(app, fixed: dict[str, str], *without: str) -> None:
    """The study says what a version said that compared overrides; or its config lacks keys."""
    with sqlite3.connect(app.folder / "outputs" / "s" / "study.db") as database:
        select = "SELECT value_json FROM study_user_attributes WHERE key = 'config'"
        config = json.loads(database.execute(select).fetchone()[0])
        change = (
            ("fixed", json.dumps(fixed))
            if not without
            else ("config", json.dumps({k: config[k] for k in config.keys() - {*without}}))
        )
        database.execute("UPDATE study_user_attributes SET key = ?, value_json = ? WHERE key = 'config'", change)


def test_a_study_of_a_version_that_compared_overrides_goes_on_by_the_command_that_began_it(app):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=2", "optim.lr=1e-2")
    app.run(*how, "hydra.sweeper.n_trials=1")
    as_of_an_older_version(app, {"data=synthetic": "", "optim.lr=0.01": ""})
    assert (
        "has other overrides: optim.lr=0.01 is missing; optim.lr=0.05 is new" in app.run(*how, "optim.lr=5e-2").stderr
    )
    assert app.run(*how).returncode == 0
    assert "has other keys: optim.lr=0.01, not optim.lr=0.05" in app.run(*how, "optim.lr=5e-2").stderr


def test_a_study_of_a_version_with_fewer_keys_goes_on_if_they_are_as_they_were(app):
    how = ("name=s", COEF, "hydra.sweeper.n_trials=2")
    app.run(*how, "hydra.sweeper.n_trials=1")
    as_of_an_older_version(app, {}, "trainer.compile", "model.bias")
    assert (
        "has other keys: trainer.compile=false, not trainer.compile=true"
        in app.run(*how, "trainer.compile=true").stderr
    )
    assert app.run(*how).returncode == 0


def test_what_is_fixed_below_a_group_that_is_searched_counts(app):
    how = ("name=s", "model=tiny,small", "hydra.sweeper.n_trials=2")
    app.run(*how, "hydra.sweeper.n_trials=1")
    other = app.run(*how, "model.num_experts=8")
    assert "has other keys: model.num_experts=16, not model.num_experts=8" in other.stderr
    assert len(app.started) == 1


def test_keys_that_cannot_change_a_result_may_differ(app):
    app.run("name=s", COEF, "hydra.sweeper.n_trials=1")
    assert app.run("name=s", COEF, "hydra.sweeper.n_trials=1", "logger=none").returncode == 0


@pytest.mark.parametrize("setting", ["sqlite:///broken", "journal:broken"])
def test_a_corrupt_file_is_one_sentence(app, setting):
    (app.folder / "broken").write_text("this is no study\n" * 100)
    search = app.run("name=s", COEF, f"hydra.sweeper.storage={setting}")
    assert search.returncode == 1
    assert search.stderr.startswith("error: ")
    assert len(search.stderr.splitlines()) == 1
    assert f"the study s in {setting} is damaged (" in search.stderr
    assert app.started == []


@pytest.mark.parametrize("setting", ["foo", "journal:", "", "x.y://a", "postgresql://host:port/db"])
def test_words_that_are_no_storage_are_refused(setting):
    with pytest.raises(UserError, match="hydra.sweeper.storage is not one of memory, journal:FILE, sqlite:///FILE"):
        StudyStorage.read(setting)


def test_a_variable_that_is_not_set_is_one_sentence(app):
    search = app.run("name=s", COEF, "hydra.sweeper.storage=${oc.env:NO_SUCH_STORAGE}")
    assert search.returncode == 2
    assert "the environment variable NO_SUCH_STORAGE is not set" in search.stderr
    assert len(search.stderr.splitlines()) == 1


@pytest.fixture
def shared_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"simbal-{os.getuid()}"


SERVER = StudyStorage.read("postgresql://host/db")


def test_the_lock_of_a_server_study_is_in_a_folder_that_nobody_else_can_write(shared_folder):
    with SERVER.lock("s"):
        assert shared_folder.stat().st_mode & 0o777 == 0o700
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(BusyError, match=f"the study s in {SERVER.shown} is being run by {holder}: wait for it"):
            SERVER.lock("s").__enter__()
        with SERVER.lock("another"):
            pass
    with SERVER.lock("s"):
        pass


def test_a_folder_for_locks_that_others_can_write_or_that_is_a_link_is_refused(shared_folder, tmp_path, monkeypatch):
    said = f"{shared_folder} is not a folder of yours alone, so that no lock can be kept there: set TMPDIR"
    (tmp_path / "theirs").mkdir(mode=0o700)
    shared_folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match=said):
        SERVER.lock("s").__enter__()
    shared_folder.unlink()
    shared_folder.mkdir()
    shared_folder.chmod(0o770)
    with pytest.raises(UserError, match=said):
        SERVER.lock("s").__enter__()
    shared_folder.chmod(0o700)
    owner = os.getuid()
    shared_folder.rename(tmp_path / f"simbal-{owner + 1}")
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UserError, match=f"simbal-{owner + 1} is not a folder of yours alone"):
        SERVER.lock("s").__enter__()
    assert [*(tmp_path / "theirs").iterdir()] == []


@pytest.mark.parametrize("folder", ["a{b}", "a%41", "a?b", "a#b", "a b", "ü'", "a@b:c"])
def test_a_folder_may_have_any_name(tmp_path, folder):
    storage = StudyStorage.in_file(tmp_path / folder / "study.db")
    storage.open()
    assert (tmp_path / folder / "study.db").is_file()
    assert [*tmp_path.iterdir()] == [tmp_path / folder]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a PostgreSQL server of its own, with a password, which is in the environment."""
    found = shutil.which("postgres") or next(iter(sorted(SERVER_PROGRAMS.glob("*/bin/postgres"), reverse=True)), None)
    if found is None:
        pytest.skip("no PostgreSQL server is installed (postgres)")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data, secret = tmp_path / "server", tmp_path / "secret"
    data.mkdir()
    secret.write_text(PASSWORD)
    as_user: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if os.getuid() == 0:  # as which it refuses to run
        as_user |= {"user": NOBODY, "group": NOBODY}
        for path in (data, secret):
            os.chown(path, NOBODY, NOBODY)
        for folder in [tmp_path, *tmp_path.parents][:-2]:
            folder.chmod(folder.stat().st_mode | 0o011)
    initdb = [str(Path(found).with_name("initdb")), "-D", str(data), "-U", "someone", f"--pwfile={secret}"]
    subprocess.run([*initdb, "-A", "scram-sha-256"], check=True, **as_user)
    secret.unlink()
    options = ["-p", str(port), "-k", "", "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    with subprocess.Popen([str(found), "-D", str(data), *options], **as_user) as process:
        try:
            monkeypatch.setenv("PGUSER", "someone")
            monkeypatch.setenv("PGPASSWORD", PASSWORD)
            address = f"127.0.0.1:{port}/postgres"
            SearchApp.wait_until(lambda: answers(address))
            yield f"postgresql+psycopg2://{address}"
        finally:
            process.send_signal(signal.SIGINT)  # its "fast shutdown"


def answers(address):
    try:
        psycopg2.connect(f"postgresql://{address}").close()
    except psycopg2.OperationalError:
        return False
    return True


@pytest.mark.slow
def test_a_server_keeps_a_study_that_a_kill_has_broken_off(server, tmp_path):
    (tmp_path / "app").mkdir()
    app = SearchApp(tmp_path / "app")
    how = ("name=s", COEF, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "seed=0-1")
    how += (f"hydra.sweeper.storage={server}",)
    app.behave(hang_after=3)
    app.kill(app.start(*how), jobs=4)
    app.behave()
    again = app.run(*how)
    assert again.returncode == 0, again.stderr
    assert "1 of 3 trials done, 2 to run" in again.stdout
    study = optuna.load_study(study_name="s", storage=server)
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 3
    unreachable = [app.run(*how, PGPASSWORD="wrong")]
    unreachable += [
        app.run(*how[:-1], f"hydra.sweeper.storage={address}")
        for address in (
            server.replace("127.0.0.1", "no-such-host.invalid"),
            server.replace("psycopg2", "no_driver"),
            server.replace("postgresql+psycopg2", "no_database"),
        )
    ]
    assert [search.returncode for search in unreachable] == [1] * 4
    assert all(len(search.stderr.splitlines()) <= 2 for search in unreachable)
    assert "password authentication failed" in unreachable[0].stderr
    assert "no-such-host.invalid" in unreachable[1].stderr
    said = "".join(search.stdout + search.stderr for search in [again, *unreachable])
    kept = b"".join(file.read_bytes() for file in app.folder.rglob("*") if file.is_file())
    with psycopg2.connect(server.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        for table in ("trial_user_attributes", "study_user_attributes"):
            cursor.execute(f"SELECT value_json FROM {table}")
            said += repr(cursor.fetchall())
    assert "aVery" not in said
    assert b"aVery" not in kept


@pytest.mark.slow
def test_a_damaged_study_of_a_server_is_one_sentence(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "report", lambda *_: None)
    search = SearchHere(tmp_path)
    search.run(storage=server)
    with psycopg2.connect(server.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        cursor.execute("UPDATE trial_values SET value = 1.5")
    said = r"^the study s in postgresql\S+ is damaged \(trial 0 has val/ppl 1\.5, .*\): choose another hydra.sweeper."
    with pytest.raises(DamagedStudyError, match=said):
        search.run(storage=server)
    with psycopg2.connect(server.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        cursor.execute("UPDATE trial_user_attributes SET value_json = '{'")
    with pytest.raises(DamagedStudyError, match="Expecting property name"):
        search.run(storage=server, take_over=True)

"""Where a study is kept, what a broken or unreachable place says, and that no password is ever written."""

import os
import shutil
import signal
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from simbal.errors import UserError
from simbal.search.storage import StudyStorage
from tests.search.app import COEF, SearchApp

SERVER_PROGRAMS = Path("/usr/lib/postgresql")
NOBODY = 65534


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
    assert second.returncode == 1
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
        (["optim.lr=1e-2"], "has other overrides: optim.lr=0.01 is new"),
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
    assert f"storage {setting}" in search.stderr
    assert app.started == []


@pytest.mark.parametrize("setting", ["foo", "journal:", ""])
def test_words_that_are_no_storage_are_refused(setting):
    with pytest.raises(UserError, match="hydra.sweeper.storage is not one of memory, journal:FILE, sqlite:///FILE"):
        StudyStorage.read(setting)


def test_a_password_is_shown_nowhere(app):
    """Neither where it comes from the environment, nor where the server cannot be reached."""
    address = "postgresql+psycopg2://someone:verysecret@127.0.0.1:1/db?password=alsosecret"
    search = app.run("name=s", COEF, "hydra.sweeper.storage=${oc.env:OPTUNA_STORAGE}", OPTUNA_STORAGE=address)
    assert search.returncode == 1
    assert "postgresql+psycopg2://127.0.0.1:1/db" in search.stderr
    assert len(search.stderr.splitlines()) == 1
    assert "secret" not in search.stdout + search.stderr
    assert all(b"secret" not in file.read_bytes() for file in app.folder.rglob("*") if file.is_file())


def test_a_variable_that_is_not_set_is_one_sentence(app):
    search = app.run("name=s", COEF, "hydra.sweeper.storage=${oc.env:NO_SUCH_STORAGE}")
    assert search.returncode == 2
    assert "Environment variable 'NO_SUCH_STORAGE' not found" in search.stderr
    assert len(search.stderr.splitlines()) == 1


def test_what_a_driver_says_is_told_without_the_password():
    storage = StudyStorage.read("postgresql+psycopg2://someone:verysecret@host/db")
    said = r"storage postgresql\+psycopg2://host/db: no login for someone:\*\*\*@host"
    with pytest.raises(UserError, match=said), storage.errors():
        raise OSError("no login for someone:verysecret@host")


@pytest.fixture
def server(tmp_path):
    """The address of a PostgreSQL server of its own, with a password."""
    psycopg2 = pytest.importorskip("psycopg2", reason="the driver psycopg2 is not installed")
    found = shutil.which("postgres") or next(iter(sorted(SERVER_PROGRAMS.glob("*/bin/postgres"), reverse=True)), None)
    if found is None:
        pytest.skip("no PostgreSQL server is installed (postgres)")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data, secret = tmp_path / "server", tmp_path / "secret"
    data.mkdir()
    secret.write_text("verysecret")
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
            address = f"someone:verysecret@127.0.0.1:{port}/postgres"
            SearchApp.wait_until(lambda: answers(psycopg2, address))
            yield f"postgresql+psycopg2://{address}"
        finally:
            process.send_signal(signal.SIGINT)  # its "fast shutdown"


def answers(psycopg2, address):
    try:
        psycopg2.connect(f"postgresql://{address}").close()
    except psycopg2.OperationalError:
        return False
    return True


def test_a_server_keeps_a_study_that_a_kill_has_broken_off(server, tmp_path):
    (tmp_path / "app").mkdir()
    app = SearchApp(tmp_path / "app")
    how = ("name=s", COEF, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "seed=0-1")
    how += ("hydra.sweeper.storage=${oc.env:OPTUNA_STORAGE}",)
    app.behave(hang_after=3)
    app.kill(app.start(*how, OPTUNA_STORAGE=server), jobs=4)
    app.behave()
    again = app.run(*how, OPTUNA_STORAGE=server)
    assert again.returncode == 0, again.stderr
    assert "1 of 3 trials done, 2 to run" in again.stdout
    study = optuna.load_study(study_name="s", storage=server)
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 3
    assert "verysecret" not in again.stdout + again.stderr
    typed = app.run(*how[:-1], "hydra.sweeper.n_trials=4", f"hydra.sweeper.storage={server}")
    assert typed.returncode == 0, typed.stderr
    assert "verysecret" not in typed.stdout + typed.stderr
    assert all(b"verysecret" not in file.read_bytes() for file in app.folder.rglob("*") if file.is_file())
    wrong = app.run(*how, OPTUNA_STORAGE=server.replace("verysecret", "wrongsecret"))
    assert wrong.returncode == 1
    assert "password authentication failed" in wrong.stderr
    assert "wrongsecret" not in wrong.stderr

"""`dry_run=true` says what a command would do, and does nothing; sweep.json says what the last command asked for."""

import json
import re

import pytest

from simbal.report.report import report
from simbal.sweep.composer import Job
from simbal.sweep.resume import plan, require_buildable
from simbal.sweep.view import forecast
from tests.composing import refusal
from tests.run_folders import fake_spec


def files(app):
    return sorted(str(path) for path in app.folder.glob("outputs/**/*"))


def test_it_starts_nothing_and_writes_nothing(app):
    done = app.run("-m", "seed=0-2", "dry_run=true")
    assert done.returncode == 0
    assert "0 finished, 0 resumed, 3 new" in done.stdout
    assert "no finished run beside them tells how long they take" in done.stdout
    assert app.started == []
    assert files(app) == []
    assert app.lines("prepared") == []


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("balancing=remoe router=softmax", "router=relu"),
        ("balancing=[lf,quantile]", "lf and quantile"),
        ("data=files data.files=nowhere.txt", "nowhere.txt"),
        ("experts=megablocks", "megablocks"),
        ("trainer.accelerator=cuda", "trainer.accelerator=cuda"),
        ("model.top_k=4 balancing=lbl,capacity model.num_experts=4", "model.top_k"),
    ],
)
def test_it_refuses_what_the_run_would_refuse(keys, named):
    code, said = refusal("train.py", ["-m", *keys.split(), "dry_run=true"])
    assert code in (1, 2)
    assert said.startswith("error: ")
    assert named in said


def test_it_builds_once_for_jobs_that_differ_in_their_seed_or_learning_rate(small_spec, monkeypatch):
    built = []
    monkeypatch.setattr("simbal.training.build.check_buildable", lambda spec, here: built.append(spec))
    keys = [(balancing, seed, lr) for balancing in ("lbl", "none") for seed in range(3) for lr in (1, 2)]
    specs = [small_spec(f"balancing={balancing}", f"seed={seed}", f"optim.lr={lr}") for balancing, seed, lr in keys]
    require_buildable([Job([], spec) for spec in specs], None)
    assert [next(iter(spec.config.balancing)) for spec in built] == ["lbl", "none"]


def test_it_tells_finished_failed_and_new_runs_apart_and_how_long_the_rest_takes(app):
    app.behave({1: "crash"})
    app.run("-m", "seed=0-1")
    before = files(app)
    keys = ("-m", "seed=0-3", "dry_run=true", "hydra.launcher.n_jobs=2")
    done = app.run(*keys)
    assert "1 finished, 1 failed before (retry_failed=true tries again), 0 resumed, 2 new" in done.stdout
    assert "2 to run, 2 at once: about 1:40, going by the runs that are finished." in done.stdout
    retried = app.run(*keys, "retry_failed=true")
    assert "1 finished, 1 resumed, 2 new" in retried.stdout
    assert "3 to run, 2 at once: about 2:30" in retried.stdout
    assert files(app) == before


def test_a_run_takes_as_long_as_its_arm_less_what_is_done_of_it(write_run, base_spec, tmp_path):
    write_run("simbal", 0, seconds=100.0)
    write_run("lbl", 0, seconds=60.0)
    half_done = write_run("simbal", 1, status=None)
    (half_done / "progress.json").write_text(json.dumps({"step": 30, "max_steps": 40}))
    jobs = [
        Job([f"balancing={name}", f"seed={seed}"], fake_spec(base_spec, tmp_path, name, seed, {}))
        for name, seed in [("simbal", 0), ("simbal", 1), ("lbl", 1), ("none", 0)]
    ]
    table, sentence = forecast(plan(jobs, retry_failed=False), slots=1)
    assert [*table.columns[1].cells] == ["finished", "resumed", "new", "new"]
    assert [*table.columns[3].cells] == ["", "0:25", "1:00", "1:20"]
    assert sentence.startswith("3 to run, 1 at once: about 2:45")


def test_a_run_that_was_never_started_is_missing_in_the_table(app, capsys):
    app.behave({0: "hang"})
    sweep = app.start("-m", "seed=0-1", "hydra.launcher.n_jobs=1")
    app.wait_until(lambda: len(app.lines("hanging")) == 2)
    sweep.terminate()
    sweep.communicate()
    report(app.folder / "outputs/default")
    shown = capsys.readouterr().out
    assert re.search(r"seed=0 +unfinished", shown)
    assert re.search(r"seed=1 +missing", shown)

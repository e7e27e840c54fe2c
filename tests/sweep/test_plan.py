"""The runs of a grid: combinations, arms, keys that only some arms have, and the forecast of a dry run."""

import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hydra_plugins.simbal_plugins.grid import combinations
from simbal.errors import UserError
from simbal.sweeping.checks import check_all_buildable
from simbal.sweeping.composer import Job
from simbal.sweeping.plan import plan
from simbal.sweeping.view import forecast
from tests.composing import compose, refusal
from tests.conftest import composer
from tests.run_folders import fake_spec


@pytest.mark.parametrize(
    ("lines", "jobs"),
    [
        (
            ["balancing=a,b", "seed=0,1", "name=x"],
            ["balancing=a seed=0 name=x", "balancing=a seed=1 name=x", "balancing=b seed=0 name=x",
             "balancing=b seed=1 name=x"],
        ),
        (["seed=0,1", "seed=7"], ["seed=7"]),
        (["balancing=[a,b],c", "name='x'", "~seed"], ["balancing=[a,b] name='x' ~seed", "balancing=c name='x' ~seed"]),
    ],
)  # fmt: skip
def test_a_grid_is_every_combination_in_order(lines, jobs):
    assert [" ".join(job) for job in combinations(OverridesParser.create().parse_overrides(lines))] == jobs


def test_a_key_of_one_strategy_varies_only_its_arm():
    runs = compose(["-m", "balancing=simbal,lbl", "balancing.simbal.coef=0.1,1", "balancing.lbl.coef=2,3", "seed=0-1"])
    assert [run["label"] for run in runs] == [
        f"balancing={name} balancing.{name}.coef={coef} seed={seed}"
        for name, coefs in (("simbal", ("0.1", "1")), ("lbl", ("2", "3")))
        for coef in coefs
        for seed in (0, 1)
    ]


def test_a_label_shows_an_added_key_without_its_plus_signs():
    runs = compose(["-m", "balancing=hash", "balancing.hash.first=1,2"])
    assert [run["label"] for run in runs] == ["balancing.hash.first=1", "balancing.hash.first=2"]


def test_an_arm_keeps_its_own_value_of_a_swept_key():
    arms = 'hydra.sweeper.arms=["balancing=hash optim.lr=0.5","balancing=lbl"]'
    runs = compose(["-m", arms, "+hydra.sweeper.params={optim.lr: 0.25, seed: 0-1}"])
    assert [(run["flat"]["optim.lr"], run["flat"]["seed"]) for run in runs] == [
        (0.5, 0), (0.5, 1), (0.25, 0), (0.25, 1)
    ]  # fmt: skip


def test_a_key_that_no_arm_has_is_named_with_its_option():
    jobs = [["balancing=simbal", "balancing.lf.center=true"], ["balancing=lbl", "balancing.lf.center=true"]]
    with pytest.raises(UserError, match="balancing.lf.center .*balancing=lf"):
        composer().drop_inapplicable(jobs, {"balancing.lf.center"})


def test_the_command_line_replaces_a_key_of_one_arm_and_says_so(app):
    done = app.run("-m", "sweeps=coefficient_search", "balancing.simbal.coef=0.1,1", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "replaces balancing.simbal.coef=tag(log,interval(1e-3,10))" in done.stdout


def files(app):
    return sorted(str(path) for path in app.folder.glob("outputs/**/*"))


def test_a_dry_run_starts_and_writes_nothing_and_estimates_the_time(app):
    new = app.run("-m", "seed=0-2", "dry_run=true")
    assert new.returncode == 0
    assert "0 finished, 0 resumed, 3 new\n3 to run" in new.stdout
    assert all(part in new.stdout for part in ("hours", "an estimate from the rate of one core", "\nDisk: "))
    assert (app.started, files(app), app.lines("prepared")) == ([], [], [])
    app.behave({1: "crash"})
    app.run("-m", "seed=0-1")
    before = files(app)
    keys = ("-m", "seed=0-3", "dry_run=true", "hydra.launcher.n_jobs=2")
    done = app.run(*keys)
    assert "1 finished, 1 failed before (retry_failed=true tries again), 0 resumed, 2 new" in done.stdout
    assert "2 to run, 2 at once: about 1:40" in done.stdout
    assert "estimated from finished runs" in done.stdout
    retried = app.run(*keys, "retry_failed=true")
    assert "1 finished, 1 resumed, 2 new" in retried.stdout
    assert "3 to run, 2 at once: about 2:30" in retried.stdout
    assert files(app) == before


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("balancing=remoe router=softmax", "router=relu"),
        ("balancing=[lf,quantile]", "lf and quantile"),
        ("data=files data.files=nowhere.txt", "nowhere.txt"),
        ("trainer.accelerator=cuda", "trainer.accelerator=cuda"),
        ("model.top_k=4 balancing=lbl,capacity model.num_experts=4", "model.top_k"),
        ("balancing=lbl,simbal seed=0 until=decided", "at least two seeds"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(keys, named):
    code, error = refusal("train.py", ["-m", *keys.split(), "dry_run=true"])
    assert code in (1, 2)
    assert error.startswith("error: ")
    assert named in error


def test_jobs_that_differ_in_seed_or_learning_rate_are_built_once(small_spec, monkeypatch):
    built = []
    monkeypatch.setattr("simbal.training.build.check_buildable", lambda spec, here: built.append(spec))
    keys = [(balancing, seed, lr) for balancing in ("lbl", "none") for seed in range(2) for lr in (1, 2)]
    specs = [small_spec(f"balancing={balancing}", f"seed={seed}", f"optim.lr={lr}") for balancing, seed, lr in keys]
    check_all_buildable([Job([], spec) for spec in specs], None)
    assert [next(iter(spec.config.balancing)) for spec in built] == ["lbl", "none"]


def test_a_run_is_expected_to_take_as_long_as_its_arm_minus_its_progress(write_run, base_spec, tmp_path):
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

"""A key that only some arms of a sweep have varies those arms alone, and what replaces an arm's key is said."""

import json

import pytest

from simbal.errors import UserError
from tests.conftest import composer
from tests.sweep.conftest import App

COEFFICIENTS = ("-m", "balancing=simbal,lbl", "balancing.simbal.coef=0.01,0.1,1", "seed=0-2")


def balancings(app: App, name: str = "default") -> list[str]:
    return sorted(folder.name.partition("-")[0] for folder in (app.folder / "outputs" / name).glob("*-seed*"))


def test_a_key_of_one_strategy_makes_one_arm_of_every_other(app):
    done = app.run(*COEFFICIENTS, "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "12 new" in done.stdout
    assert done.stdout.count("balancing=lbl seed=0 ") == 1
    assert "balancing=simbal balancing.simbal.coef=0.01 seed=2" in done.stdout


def test_its_arms_are_trained_and_labelled_and_found_again(app):
    done = app.run(*COEFFICIENTS[:3], "seed=0-1", "balancing.lbl.coef=0.1,1")
    assert done.returncode == 0, done.stderr
    assert balancings(app) == ["lbl"] * 4 + ["simbal"] * 6
    table = json.loads((app.folder / "outputs/default/table.json").read_text())
    labels = [(arm["label"]["balancing.simbal.coef"], arm["label"]["balancing.lbl.coef"]) for arm in table["arms"]]
    assert {*labels} == {("0.01", None), ("0.1", None), ("1", None), (None, "0.1"), (None, "1")}
    assert len(labels) == 5
    again = app.run(*COEFFICIENTS[:3], "seed=0-1", "balancing.lbl.coef=0.1,1", "dry_run=true")
    assert "10 finished, 0 resumed, 0 new" in again.stdout


def test_a_composition_has_the_keys_of_its_parts():
    job = ["balancing=[lf,simbal]", "balancing.simbal.coef=1", "balancing.lf.update_rate=1", "balancing.lbl.coef=1"]
    assert composer().foreign(job) == ["balancing.lbl.coef=1"]


def test_a_key_that_no_arm_has_is_an_error_that_names_it():
    jobs = [["balancing=simbal", "balancing.lf.center=true"], ["balancing=lbl", "balancing.lf.center=true"]]
    with pytest.raises(UserError, match="balancing.lf.center .*balancing=lf"):
        composer().own_keys(jobs, {"balancing.lf.center"})


def test_a_key_of_one_arm_of_a_search_leaves_the_others_alone(app):
    done = app.run("-m", "sweeps=coefficient_search", "balancing.simbal.coef=0.1,1", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "takes the place of balancing.simbal.coef=tag(log,interval(1e-3,10))" in done.stdout

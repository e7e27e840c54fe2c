"""The example strategies of the guide are complete: the conformance suite finds them, and they train."""

import re
import runpy
import shutil
import sys
from inspect import signature
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class

from simbal import balancing
from simbal.conformance import CHECKS
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.balancing.cases import cases_of, registered
from tests.conftest import CONF, MARKOV, SMALL

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "own_strategy.md"
CAPTION = r"`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```"
NAMES = ("importance", "my_threshold")
BLOCKS = re.findall(CAPTION, GUIDE.read_text(), re.DOTALL)
FILES = {name: {path: text for path, text in BLOCKS if name in path} for name in NAMES}


@pytest.fixture(params=FILES)
def name(request) -> str:
    return request.param


@pytest.fixture
def conf(name, tmp_path, monkeypatch) -> Path:
    """The config folder with the page's files pasted into a copy of it and of the package's search path."""
    shutil.copytree(CONF, tmp_path / "conf")
    for folder in ("src/simbal/balancing", "tests/balancing"):
        (tmp_path / folder).mkdir(parents=True)
    for path, text in FILES[name].items():
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(balancing, "__path__", [*balancing.__path__, str(tmp_path / "src/simbal/balancing")])
    yield tmp_path / "conf"
    sys.modules.pop(f"simbal.balancing.{name}", None)
    vars(balancing).pop(name, None)


def test_the_suite_finds_it_with_the_defaults_of_its_yaml_file_and_it_passes(name, conf):
    keys = registered(conf / "balancing")[name]
    parameters = signature(get_class(keys["_target_"])).parameters
    assert all(parameters[key].default == keys[key] for key in keys.keys() - {"_target_", "schedule"})
    for case in cases_of(name, keys):
        for check in CHECKS:
            check(case)


def test_it_trains(name, conf, tmp_path, cache_dir):
    others = {"importance": "importance,lf", "my_threshold": "my_threshold,simbal"}
    places = [f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}", f"balancing=[{others[name]}]"]
    with initialize_config_dir(str(conf), version_base="1.3"):
        overrides = [*SMALL, *MARKOV, *places, "trainer.max_steps=3", "trainer.val_every=3"]
        spec = RunSpec.from_hydra(compose("config", overrides, return_hydra_config=True))
    train(spec)
    record = RunFolder(spec.path).read_record()
    assert record["objective"][name].get("effective_coef") == (0.02 if name == "importance" else None)


@pytest.mark.parametrize("name", ["my_threshold"])
def test_the_threshold_of_the_guide_passes_its_own_test(name, conf):
    runpy.run_path(str(conf.parent / "tests/balancing/test_my_threshold.py"))["test_thresholds_follow_the_cutoffs"]()


def test_every_strategy_that_the_guide_lists_exists():
    table = GUIDE.with_name("strategies.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {"lbl", "simbal", "lf_lbl", "hash"} <= listed <= {path.stem for path in (CONF / "balancing").glob("*.yaml")}

"""The strategy that the guide writes is complete: the suite picks it up, and it trains."""

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir

from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.balancing import loss_checks, training_checks
from tests.balancing.cases import cases_of, registered
from tests.conftest import CONF, MARKOV, SMALL

GUIDES = Path(__file__).parents[2] / "docs" / "guide"
NAME = "simbal.balancing.importance"


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", (GUIDES / "own_strategy.md").read_text(), re.DOTALL)
    return text


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """The config folder with the guide's file added, and its class where Python finds it."""
    module = ModuleType(NAME)
    exec(block("python"), module.__dict__)
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr("simbal.balancing.importance", module, raising=False)
    folder = shutil.copytree(CONF, tmp_path / "conf")
    (folder / "balancing" / "importance.yaml").write_text(block("yaml"))
    return folder


def test_it_is_short():
    assert len((block("python") + block("yaml")).splitlines()) < 40


def test_the_suite_picks_it_up_and_it_passes(conf):
    keys = registered(conf / "balancing")["importance"]
    for case in cases_of("importance", keys):
        for check in loss_checks.CHECKS + training_checks.CHECKS:
            check(case)


def test_it_trains(conf, tmp_path, cache_dir):
    places = [f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}", "balancing=[importance,lf]"]
    with initialize_config_dir(str(conf), version_base="1.3"):
        spec = RunSpec.from_hydra(compose("config", [*SMALL, *MARKOV, *places], return_hydra_config=True))
    train(spec)
    record = RunFolder(spec.path).read_record()
    assert record["objective"]["importance"]["effective_coef"] == pytest.approx(0.02)


def test_every_strategy_that_the_guide_lists_exists():
    table = (GUIDES / "strategies.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {"lbl", "simbal", "lf_lbl", "hash"} <= listed
    assert listed <= {path.stem for path in (CONF / "balancing").glob("*.yaml")}

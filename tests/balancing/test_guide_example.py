"""The strategy that the guide writes is complete: the suite picks it up, and it trains."""

import re
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

GUIDES = Path(__file__).parents[2] / "docs" / "guide"
CAPTION = r"`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```"
FILES = dict(re.findall(CAPTION, (GUIDES / "own_strategy.md").read_text(), re.DOTALL))  # by path


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """The config folder, once the guide's files are pasted into a copy of it and of the package's search path."""
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "src/simbal/balancing").mkdir(parents=True)
    for path, text in FILES.items():
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(balancing, "__path__", [*balancing.__path__, str(tmp_path / "src/simbal/balancing")])
    yield tmp_path / "conf"
    sys.modules.pop("simbal.balancing.importance", None)
    vars(balancing).pop("importance", None)


def test_it_is_one_class_and_one_yaml():
    assert [*FILES] == ["src/simbal/balancing/importance.py", "conf/balancing/importance.yaml"]
    assert "".join(FILES.values()).count("\nclass ") == 1
    assert len("".join(FILES.values()).splitlines()) < 40


def test_the_suite_picks_it_up_and_it_passes(conf):
    keys = registered(conf / "balancing")["importance"]
    for case in cases_of("importance", keys):
        for check in CHECKS:
            check(case)


def test_its_defaults_are_those_of_its_yaml(conf):
    keys = registered(conf / "balancing")["importance"]
    assert signature(get_class(keys["_target_"])).parameters["coef"].default == keys["coef"]


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

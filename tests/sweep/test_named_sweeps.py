"""Every named sweep composes as many runs as its comment says, and runs at a tiny scale."""

import json
import math
import re

import pytest
import yaml

from simbal.config.options import first_comment, options
from tests.composing import compose
from tests.conftest import CONF, MARKOV
from tests.programs import run

ROOT = CONF.parent
FILES = {file.stem: file for file in sorted((ROOT / "sweeps").glob("*.yaml"))}
SHORT = (  # d_model is the largest number of experts, as a frozen router has orthonormal rows
    "trainer.max_steps=2", "trainer.val_every=1", "trainer.pes_every=1", "trainer.pes_tokens=32",
    "trainer.global_batch=2", "trainer.micro_batch=2", "optim.warmup_steps=1", "logger=none", "model.num_layers=1",
    "model.d_model=64", "model.d_expert=8", "model.num_heads=2",
)  # fmt: skip
WORDS = {"six": 6, "nine": 9, "ten": 10, "twelve": 12, "fifteen": 15, "eighteen": 18, "thirty": 30}
TRAINED = ("bias_controllers", "controls", "experts_grid", "learning_rate")  # tests/results composes the other studies
COUNTED = [
    pytest.param(name, marks=pytest.mark.slow) if name == "league" else name
    for name in FILES
    if name != "coefficient_search"
]
FEWER = {"experts_grid": ["model.num_experts=16"]}


@pytest.mark.parametrize("name", FILES)
def test_it_asks_a_question_states_its_cost_and_has_its_own_folder(name):
    question, _, cost = " ".join(first_comment(FILES[name])).partition("Cost: ")
    assert "?" in question
    assert "two CPU cores" in cost
    assert yaml.safe_load(FILES[name].read_text())["name"] == name
    assert any(f"`{name}`" in file.read_text() for file in (ROOT / "docs/guide").glob("*.md"))
    assert name in options("sweeps")


@pytest.mark.parametrize("name", COUNTED)
def test_it_has_as_many_runs_as_its_comment_says(name):
    count = re.search("Cost: (.*?) runs", " ".join(first_comment(FILES[name])))[1]  # such as `29 x 3`
    assert len(compose(["-m", f"sweeps={name}"])) == math.prod(WORDS.get(n) or int(n) for n in count.split(" x "))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_it_completes_with_one_seed_at_a_tiny_scale(name, tmp_path, cache_dir):
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    keys = (f"sweeps={name}", "seed=0", *SHORT, *MARKOV, *places, *FEWER.get(name, ()))
    done = run("train.py", "-m", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    table = json.loads((tmp_path / name / "table.json").read_text())
    assert [run["seed"] for arm in table["arms"] for run in arm["runs"]] == [0] * len(table["arms"])
    assert not table["without_result"]
    written = yaml.safe_load(FILES[name].read_text())
    assert len(table["metrics"]) == len(written["columns"])
    assert name in FEWER or any(arm["label"]["balancing"] == written["baseline"] for arm in table["arms"])
    assert (tmp_path / name / "index.html").stat().st_size > 10_000

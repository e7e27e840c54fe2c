"""Every named sweep runs from its first job to its table, at a scale that a test can afford."""

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
NAMES = sorted(file.stem for file in (ROOT / "sweeps").glob("*.yaml"))
SHORT = (  # as wide as there are most experts, or a frozen router has no orthonormal rows
    "trainer.max_steps=2", "trainer.val_every=1", "trainer.pes_every=1", "trainer.pes_tokens=32",
    "trainer.global_batch=2", "trainer.micro_batch=2", "optim.warmup_steps=1", "logger=none", "model.num_layers=1",
    "model.d_model=64", "model.d_expert=8", "model.num_heads=2",
)  # fmt: skip
SEARCHES = {"coefficient_search"}  # whose runs are chosen as they go
GRIDS = [name for name in NAMES if name not in SEARCHES]
WORDS = {"six": 6, "nine": 9, "ten": 10, "twelve": 12, "fifteen": 15, "eighteen": 18, "thirty": 30}
WHOLE = {  # tests/results composes their studies and compares the runs
    "coefficient", "collapse", "language_modeling", "loss_free", "router_precision", "scale_or_direction",
    "significance",
}  # fmt: skip
EVERY_STRATEGY = {"league"}  # too many runs; strategies are tested one by one
FEWER = {"experts_grid": ["model.num_experts=16"]}  # rows, as the others differ from them by a number


def sweep(name, folder, *arguments):
    return run("train.py", "-m", f"sweeps={name}", f"output_dir={folder}", *arguments, cwd=folder)


def names_of(table) -> set[str]:
    """What a baseline may be: an arm's balancing, or its name."""
    labels = [arm["label"] for arm in table["arms"]]
    settings = [" ".join(f"{key.split('.')[-1]}={text}" for key, text in [*of.items()][1:]) for of in labels]
    balancings = [of["balancing"] for of in labels]
    return {*balancings, *(f"{one} {more}" for one, more in zip(balancings, settings, strict=True))}


@pytest.mark.parametrize("name", NAMES)
def test_each_asks_a_question_states_its_cost_and_has_its_own_folder(name):
    file = ROOT / "sweeps" / f"{name}.yaml"
    comment = " ".join(first_comment(file))
    assert "?" in comment.partition("Cost: ")[0]
    assert "two CPU cores" in comment.partition("Cost: ")[2]
    assert yaml.safe_load(file.read_text())["name"] == name
    assert f"`{name}`" in (ROOT / "docs/guide/sweeps.md").read_text()
    assert name in options("sweeps")


@pytest.mark.parametrize("name", GRIDS)
def test_its_command_is_as_many_runs_as_the_file_says(name):
    jobs = compose(["-m", f"sweeps={name}"])
    said = re.search("Cost: (.*?) runs", " ".join(first_comment(ROOT / "sweeps" / f"{name}.yaml")))[1]  # `29 x 3`
    assert len(jobs) == math.prod(WORDS.get(word) or int(word) for word in said.split(" x "))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*GRIDS} - WHOLE - EVERY_STRATEGY))
def test_each_completes_at_one_seed_and_a_tiny_scale(name, tmp_path, cache_dir):
    small = ("seed=0", *SHORT, *MARKOV, *FEWER.get(name, ()))
    done = sweep(name, tmp_path, *small, f"data.cache_dir={cache_dir}")
    assert done.returncode == 0, done.stderr + done.stdout
    table = json.loads((tmp_path / name / "table.json").read_text())
    seeds = [run["seed"] for arm in table["arms"] for run in arm["runs"]]
    assert seeds == [0] * len(table["arms"])
    assert not table["without_result"]
    written = yaml.safe_load((ROOT / "sweeps" / f"{name}.yaml").read_text())
    assert "columns" not in written or len(table["metrics"]) == len(written["columns"])
    assert written["baseline"] in names_of(table) or name in FEWER, "no arm is the baseline"
    assert (tmp_path / name / "index.html").stat().st_size > 10_000
    logs = [file.read_text() for file in (tmp_path / name).glob("*/train.log")]
    assert all("training from step 0 to 2" in log for log in logs)
    assert len(logs) == len(seeds)

"""Run folders and configs for tests, without training."""

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from simbal.config.compose import validate, validate_config
from simbal.config.schema import Config
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def base_spec() -> RunSpec:
    with initialize_config_dir(config_dir=str(REPOSITORY / "conf"), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", overrides=["data=synthetic"], return_hydra_config=True))


@pytest.fixture
def write_run(base_spec: RunSpec, tmp_path: Path) -> Callable[..., Path]:
    """`write_run("lbl", seed=1)`: write the folder of a finished run to tmp_path/outputs/fake, and return its path."""

    def write(balancing: str = "simbal", seed: int = 0, status: str | None = "finished", **fields: Any) -> Path:
        spec = fake_spec(base_spec, tmp_path, balancing, seed, fields.pop("keys", {}))
        folder = RunFolder(spec.path)
        folder.write_spec(spec)
        record = {
            "status": status,
            "config_hash": spec.hash,
            "choices": spec.choices,
            "seed": seed,
            "data": {"source": "synthetic", "text": "a", "tokens": "b", "versions": {"numpy": "2.0"}},
            "definitions": {"val/ppl": "exp of the loss"},
            "steps": 400,
            "tokens": 819_200,
            "tokens_per_second": 9000.0,
            "metrics": {"val/ppl": 100.0 + seed, "val/max_vio": 0.5},
        }
        if status is not None:
            folder.write_record(record | fields)
        return folder.path

    return write


def fake_spec(base: RunSpec, tmp_path: Path, balancing: str, seed: int, keys: dict[str, Any]) -> RunSpec:
    """Return a run in tmp_path/outputs/fake; a key without a dot chooses the option of a group, if there is one."""
    options = {key: value for key, value in keys.items() if key in base.choices and isinstance(value, str)}
    values = {
        "balancing": {balancing: {"_target_": "simbal.balancing.weight_losses.SimBal", "coef": 0.1}},
        "seed": seed,
        "optim.warmup_steps": 10,  # fewer than the steps of a fake run
        "name": "fake",
        "output_dir": str(tmp_path / "outputs"),
    } | {key: value for key, value in keys.items() if key not in options}
    choices = base.choices | {"balancing": balancing} | options
    plain = changed(base.written, values)
    return RunSpec(validate(Config, plain), choices, plain)  # not validated, as a folder may be anybody's


def changed_spec(base: RunSpec, keys: dict[str, Any], **options: str) -> RunSpec:
    """Return the base run with other values by dotted key and other options by group."""
    plain = changed(base.written, keys)
    return RunSpec(validate_config(plain), base.choices | options, plain)


def changed(plain: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dicts with other values by dotted key."""
    copy = deepcopy(plain)
    for key, value in keys.items():
        *parents, last = key.split(".")
        reduce(getitem, parents, copy)[last] = value
    return copy

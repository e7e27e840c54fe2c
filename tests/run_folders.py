"""Run folders without a run."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def base_spec() -> RunSpec:
    with initialize_config_dir(config_dir=str(REPOSITORY / "conf"), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", overrides=["data=synthetic"], return_hydra_config=True))


@pytest.fixture
def write_run(base_spec: RunSpec, tmp_path: Path) -> Callable[..., Path]:
    """Writes one finished run folder, its record with a checksum, to tmp_path/outputs/fake and returns its path."""

    def write(balancing: str = "simbal", seed: int = 0, status: str | None = "finished", **fields: Any) -> Path:
        spec = changed_spec(base_spec, tmp_path, balancing, seed, fields.pop("keys", {}))
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
            "metrics": {"val/ppl": 100.0 + seed, "load/max_vio": 0.5},
        }
        if status is not None:
            folder.write_record(record | fields)
        return folder.path

    return write


def changed_spec(base: RunSpec, tmp_path: Path, balancing: str, seed: int, keys: dict[str, Any]) -> RunSpec:
    """The base run with another balancing, seed and dotted keys; a key without a dot is a group's option."""
    config, choices = deepcopy(base.config), base.choices | {"balancing": balancing}
    config |= {"balancing": {balancing: {"coef": 0.1}}, "seed": seed}
    config |= {"name": "fake", "output_dir": str(tmp_path / "outputs")}
    for key, value in keys.items():
        node = config
        *parents, last = key.split(".")
        if not parents and key in choices:
            choices[key] = value
            continue
        for parent in parents:
            node = node[parent]
        node[last] = value
    return RunSpec(config, choices)

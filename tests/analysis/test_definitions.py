"""Every number that an analysis puts into a table has a definition."""

import pytest
import yaml
from hydra.utils import get_method

from simbal.analysis.evaluate import evaluate
from simbal.report.collect import collect
from tests.analysis.module_runs import trained_run
from tests.conftest import CONF

FEW = {"limit": 2, "batch_size": 4, "tokens": 64, "max_tokens": 4, "step": 2}
NUMBERS = (
    "quality", "redundancy", "routing", "orthogonality", "dropping", "pruning", "counterfactual", "margin",
    "coactivation", "ep_load",
)  # fmt: skip


@pytest.fixture(scope="module")
def analysed(tmp_path_factory, cache_dir):
    run = trained_run(tmp_path_factory, cache_dir, "trainer.max_steps=1")
    settings = {}
    for name in NUMBERS:
        keys = yaml.safe_load((CONF / "analysis" / f"{name}.yaml").read_text())[name]
        settings[name] = {key: FEW.get(key, value) for key, value in keys.items()}
        assert get_method(keys["_target_"]).__name__ == name
    evaluate(settings, str(run.path), overwrite=False, accelerator="cpu", output_dir="unused")
    return collect(run.path.parent)[0]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_one(analysed, name):
    numbers = [key for key in analysed.analysed if key.startswith(f"{name}.")]
    assert numbers
    assert [key for key in numbers if not analysed.definitions.get(key)] == []

"""Every YAML file of conf/ means something: it composes, says what it is, and trains."""

import pytest

from simbal.config.schema import GROUPS
from simbal.training.run import train
from tests.conftest import CONF

HALF = ["trainer.micro_batch=4"]  # of the batch, for each of two devices
DENSE = ["balancing=none", "model.num_experts=0"]
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
FOR_A_GPU = [("experts", "fused"), ("experts", "megablocks")]  # trained in tests/experts/megablocks_interpreted.py


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_says_in_its_first_line_what_it_is(small_spec, group, option):
    assert (CONF / group / f"{option}.yaml").read_text().startswith("# ")
    needed = {
        "files": ["data.files=corpus.txt"],
        "tiny_dense": DENSE,
        "dense_m": DENSE,
        "dense_l": DENSE,
        "ddp": HALF,
        "fsdp": HALF,
    }
    spec = small_spec(f"{group}={option}", *needed.get(option, []))
    assert spec.choices[group] == option


@pytest.mark.parametrize(
    ("group", "option"), [pair for pair in OPTIONS if pair[0] not in ("data", "model") and pair not in FOR_A_GPU]
)
def test_every_option_trains(small_spec, group, option):
    forced = "trainer.force_precision=true"  # some of them are in bf16, for which not every CPU has instructions
    spec = small_spec(f"{group}={option}", forced, *(HALF if option in ("ddp", "fsdp") else []))
    train(spec)
    assert (spec.path / "record.json").exists()

"""Every YAML file of conf/ means something: it composes, says what it is, and trains."""

from functools import partial

import pytest

from simbal.config.schema import GROUPS
from simbal.training.run import train
from tests.conftest import CONF

HALF = ["trainer.micro_batch=4"]  # of the batch, for each of two devices
DENSE = ["balancing=none", "model.num_experts=0"]
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
SLOW = ("ddp", "fsdp", "mlflow", "wandb")  # a process for each device; libraries that take seconds to import
FOR_A_GPU = [("experts", "fused"), ("experts", "megablocks")]  # trained in tests/experts/megablocks_interpreted.py


def spec_of(small_spec, group, option):
    needed = {
        "files": ["data.files=corpus.txt"],
        "tiny_dense": DENSE,
        "dense_m": DENSE,
        "dense_l": DENSE,
        "ddp": HALF,
        "fsdp": HALF,
        "relu": ["balancing=remoe"],
    }
    forced = "trainer.force_precision=true"  # some are in bf16, for which not every CPU has instructions
    return small_spec(f"{group}={option}", forced, *needed.get(option, []))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_says_in_its_first_line_what_it_is(small_spec, group, option):
    assert (CONF / group / f"{option}.yaml").read_text().startswith("# ")
    named = {"deepseek_v3": "lf_groups_lbl_sequence"}.get(option, option)  # a set of strategies, by those in it
    assert spec_of(small_spec, group, option).choices[group] == named


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("group", "option"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] in SLOW else [])
        for pair in OPTIONS
        if pair[0] not in ("data", "model") and pair not in FOR_A_GPU
    ],
)
def test_every_option_trains(small_spec, group, option):
    spec = spec_of(partial(small_spec, "trainer.max_steps=4", "trainer.val_every=2"), group, option)
    train(spec)
    assert (spec.path / "record.json").exists()

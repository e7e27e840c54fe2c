"""Every file of conf/ composes, has a description and trains; comments of keys come from the schema."""

import shutil
from functools import partial

import pytest

from simbal.config.schema import GROUPS, every_key
from simbal.training.build import check_buildable
from simbal.training.run import train
from tests.compiler import HAS_COMPILER
from tests.conftest import CONF, composer

TWO_DEVICES = ["trainer.micro_batch=4"]
DENSE = ["balancing=none", "model.num_experts=0"]
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
SLOW = ("ddp", "fsdp", "mlflow", "wandb")  # a process per device; libraries that take seconds to import
# backends of a GPU, trained in tests/experts/megablocks_interpreted.py, and native without a C compiler
ELSEWHERE = [("experts", "fused"), ("experts", "megablocks")]
if not HAS_COMPILER:
    ELSEWHERE.append(("experts", "native"))
NEEDED = {
    "files": ["data.files=corpus.txt"],
    "tiny_dense": DENSE,
    "dense_m": DENSE,
    "dense_l": DENSE,
    "ddp": TWO_DEVICES,
    "fsdp": TWO_DEVICES,
    "relu": ["balancing=remoe"],
    "deepseek_v4": ["balancing.hash.first=1"],
}


def spec_of(small_spec, group, option):
    # force_precision: some options train in bf16, for which not every CPU has instructions
    return small_spec(f"{group}={option}", "trainer.force_precision=true", *NEEDED.get(option, []))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_can_be_built_and_describes_itself(small_spec, group, option):
    spec = spec_of(small_spec, group, option)
    parts = {"deepseek_v3": "lf_groups_lbl_sequence", "deepseek_v4": "hash_lf"}
    named = parts.get(option, option)  # a list of strategies is named by its parts
    assert spec.choices[group] == named
    assert (CONF / group / f"{option}.yaml").read_text().startswith("# ")
    check_buildable(spec, here=(group, option) not in ELSEWHERE)


@pytest.mark.parametrize("more", [[], ["model=bench"], ["optim=paper_m", "data=dclm"]])
def test_debug_trainer_is_short_without_warm_up_and_validates_on_one_sequence(more):
    config = composer().job(["trainer=debug", *more]).spec.config
    assert (config.trainer.max_steps, config.optim.warmup_steps) == (20, 0)
    assert config.data.validation_tokens == config.data.validation_document_tokens == config.data.seq_len


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("group", "option"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] in SLOW else [])
        for pair in OPTIONS
        if pair[0] not in ("data", "model", "balancing") and pair not in ELSEWHERE
    ],
)
def test_option_trains(small_spec, group, option):
    shortened = ("trainer.max_steps=2", "trainer.val_every=2", "optim.warmup_steps=1", "data.validation_tokens=64")
    spec = spec_of(partial(small_spec, *shortened), group, option)
    train(spec)
    assert (spec.path / "record.json").exists()


def test_comments_are_written_from_the_schema(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(CONF.parent / "docs")
    from generators import comments

    copy = shutil.copytree(CONF, tmp_path / "conf", symlinks=True)
    comments.write_comments(copy)
    texts = {path: [file.read_text() for file in sorted(path.rglob("*.yaml"))] for path in (CONF, copy)}
    assert texts[copy] == texts[CONF]
    assert [name for name, field in every_key().items() if not field.description or "\n" in field.description] == []
    long = [line for file, _ in comments.described(CONF) for line in file.read_text().splitlines() if len(line) > 120]
    assert long == []

"""`from=FOLDER key=value` is the command that made the run, with this change."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from simbal.cli.resume import literal
from simbal.cli.resume import overrides_from as begun_from
from simbal.errors import ConfigError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from tests.conftest import CONF

PARSER = OverridesParser.create()
COMMANDS = [
    (),
    ("balancing=[simbal,router_z_loss]", "balancing.router_z_loss.coef=0.5"),
    ("balancing=lf_simbal", "balancing.simbal.coef=0.3"),
    ("balancing=lbl_listing", "balancing.lbl_listing.schedule=[[0,1],[100,0.5]]"),
    ("balancing=ernie_ortho", "model=small", "model.num_layers=3"),
    ("model.num_experts=0", "balancing=none", "optim.betas=[0.8,0.99]", "optim.eps=1e-9"),
    ("model=tiny_dense", "balancing=none", "router=sigmoid"),
    ("data=files", "data.files=corpus.jsonl"),
    ("data=files", """data.files=["it's, a file.txt",'{b}.txt']""", "data.txt_split=blank_lines"),
    ("data=synthetic", "data.validation_tokens=null", "data.branching=3", "seed=7"),
    ("data=dclm", "data.location='shards/{shard}.jsonl.zst'"),
    ("data.packages.numpy='1.0'", "data.strict=true"),
    ("~data.packages.numpy",),
    ("+data.packages.attrs='25.4.0'",),
    ("trainer=fsdp", "trainer.pes_every=5", "trainer.global_batch=16", "trainer.micro_batch=8"),
]
CHANGES = [("seed=11",), ("optim.lr=0.5",), ("router=sigmoid",), ("optim=adamw", "optim.weight_decay=0.3")]
PAIRS = [
    pytest.param(command, change, marks=[pytest.mark.slow] if (i - j) % len(CHANGES) else [])  # each at least once
    for i, command in enumerate(COMMANDS)
    for j, change in enumerate(CHANGES)
]


def composed(lines) -> RunSpec:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", [*lines], return_hydra_config=True))


def begun(folder: Path, *lines: str) -> RunSpec:
    """The run of the command line `from=folder` with these lines."""
    return composed(begun_from(folder, PARSER.parse_overrides([f"from={folder}", *lines])))


def made(lines, folder: Path) -> RunSpec:
    """The run of a command, whose folder is written."""
    spec = composed([*lines, f"output_dir={folder}"])
    RunFolder(spec.path).write_spec(spec)
    return spec


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_it_composes_to_the_run_that_it_is_begun_from(command, tmp_path):
    original = made(command, tmp_path)
    again = begun(original.path)
    assert (again.hash, again.choices) == (original.hash, original.choices)


@pytest.mark.parametrize(("command", "change"), PAIRS)
def test_a_change_makes_the_run_that_the_command_with_it_makes(command, change, tmp_path):
    original = made(command, tmp_path)
    keys = {line.partition("=")[0] for line in change}  # an option that is chosen anew brings its own keys
    kept = [line for line in command if not {line.partition("=")[0], line.partition(".")[0]} & keys]
    assert begun(original.path, *change).hash == composed([*kept, *change]).hash


def test_another_option_brings_its_own_keys(tmp_path):
    original = made(("balancing=lbl", "balancing.lbl.coef=0.5", "seed=3"), tmp_path)
    assert begun(original.path, "balancing=simbal").hash == composed(["balancing=simbal", "seed=3"]).hash


def test_nothing_is_taken_over_that_cannot_change_the_result(tmp_path):
    original = made(
        ("name=mine", "logger=wandb", "data.cache_dir=away", "trainer.ckpt_every=7", "columns=[ppl]", "seed=3"),
        tmp_path,
    )
    assert begun(original.path).written == composed(["seed=3"]).written


@pytest.mark.parametrize(
    ("before", "after", "give"),
    [
        ("simbal.balancing.weight_losses.SimBal", "evil.SimBal", "balancing="),
        ("model: tiny", "model: mine", "model="),
    ],
)
def test_what_conf_lacks_is_to_be_given(before, after, give, tmp_path):
    original = made((), tmp_path)
    config = original.path / "config.yaml"
    config.write_text(config.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=f"give {give}"):
        begun(original.path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from("'\"\\{}[](),:=~@ \n\tab1.é-+"), max_size=12)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0$"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z_]{1,6}", fullmatch=True), inner),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_a_literal_is_read_as_the_value_that_it_stands_for(value):
    (override,) = PARSER.parse_overrides([f"key={literal(value)}"])
    read = override.value()
    assert (read, repr(read)) == (value, repr(value))

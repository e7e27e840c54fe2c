"""`run=FOLDER` resumes a run wherever it is; `from=FOLDER key=value` equals the run's own command with that change."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from simbal.cli.resume import literal, overrides_from, run_to_resume
from simbal.errors import ConfigError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.config.any_form import value_at
from tests.conftest import CONF
from tests.in_process import run
from tests.sweep.small_sweep import curve
from tests.training.run_files import train_until

PARSER = OverridesParser.create()
COMMANDS = [
    (),
    ("balancing=[simbal,router_z_loss]", "balancing.router_z_loss.coef=0.5"),
    ("balancing=lf_simbal", "balancing.simbal.coef=0.3", "optim.betas=[0.8,0.99]", "optim.eps=1e-9"),
    ("balancing=lbl_listing", "balancing.lbl_listing.schedule=[[0,1],[100,0.5]]"),
    ("balancing=ernie_ortho", "model=small", "model.num_layers=3"),
    ("model=tiny_dense", "balancing=none", "router=sigmoid"),
    ("data=files", """data.files=["it's, a file.txt",'{b}.txt']""", "data.txt_split=blank_lines"),
    ("data=synthetic", "data.validation_tokens=null", "data.branching=3", "seed=7"),
    ("data=dclm", "data.location='shards/{shard}.jsonl.zst'"),
    ("data.packages.numpy='1.0'", "data.strict=true"),
    ("~data.packages.numpy", "+data.packages.attrs='25.4.0'"),
    ("trainer=fsdp", "trainer.pes_every=5", "trainer.global_batch=16", "trainer.micro_batch=8"),
]
CHANGES = [("seed=11",), ("optim.lr=0.5",), ("router=sigmoid",), ("optim=adamw", "optim.weight_decay=0.3")]
PAIRS = [(command, CHANGES[place % len(CHANGES)]) for place, command in enumerate(COMMANDS)]


def composed(lines) -> RunSpec:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", [*lines], return_hydra_config=True))


def write_folder(lines, folder) -> RunSpec:
    spec = composed([*lines, f"output_dir={folder}"])
    RunFolder(spec.path).write_spec(spec)
    return spec


def started_from(folder, *lines) -> RunSpec:
    return composed(overrides_from(folder, PARSER.parse_overrides([f"from={folder}", *lines])))


def resumed(folder, *lines) -> RunSpec:
    return run_to_resume(folder, PARSER.parse_overrides([f"run={folder}", *lines]))


def test_killed_run_that_was_moved_resumes_to_the_bits_of_an_undisturbed_one(small_spec, tmp_path, monkeypatch):
    undisturbed, killed = (small_spec("trainer.log_every=1", output_dir=tmp_path / name) for name in "ab")
    train(undisturbed)
    train_until(monkeypatch, killed, 9)
    moved = killed.path.rename(tmp_path / "a run of mine")
    ended = run(tmp_path, "train.py", f"run={moved}", "trainer.ckpt_every=50")
    assert ended.returncode == 0, ended.stderr
    assert [*(tmp_path / "b").glob("*/*")] == []
    assert curve(moved / "metrics.jsonl") == curve(undisturbed.path / "metrics.jsonl")
    assert "from step 8 " in (moved / "train.log").read_text()
    assert RunFolder(moved).is_finished(RunFolder(moved).read_spec())


@pytest.mark.parametrize("override", ["trainer.ckpt_every=3", "logger.kind=tensorboard", "data.threads=2", "name=b"])
def test_key_that_cannot_change_the_result_may_be_overridden_on_resume(write_run, override):
    path = write_run()
    run = resumed(path, override)
    key, _, value = override.partition("=")
    assert (str(value_at(run.written, key)), run.path, run.trusted) == (value, path, False)
    assert run.hash == RunFolder(path).read_spec().hash


def test_number_of_devices_may_change_on_resume_and_is_not_saved(write_run):
    path = write_run(keys={"trainer.micro_batch": 1})
    before, run = RunFolder(path).read_spec(), resumed(path, "trainer.devices=2")
    assert (run.config.trainer.devices, run.hash, run.written) == (2, before.hash, before.written)


@pytest.mark.parametrize(
    "lines",
    [
        ["trainer.devices=3"], ["seed=7"], ["model=small"], ["name=a,b"], ["~data.threads"],
        ["trainer.ckpt_evry=5"], ["trainer.ckpt_every=0"],
    ],
)  # fmt: skip
def test_override_that_makes_another_run_is_refused_on_resume(write_run, lines):
    with pytest.raises(ConfigError) as refusal:
        resumed(write_run(), *lines)
    assert lines[0] in str(refusal.value)
    assert ("from=" in str(refusal.value)) == (lines == ["seed=7"])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["run={}", "-m"], "-m"), (["run={}", "--cfg", "job"], "--cfg"), (["run={},{}"], "run="),
        (["run=[{},{}]"], "run="), (["run={}", "run={}"], "run="), (["run="], "run="), (["from={},{}"], "from="),
        (["-m", "from={}", "sweeps=league"], "sweeps=league"), (["run={}/nothing"], "run="),
        (["run={}", "dry_run=true"], "dry_run="),
    ],
)  # fmt: skip
def test_command_that_does_not_name_a_single_run_is_refused(write_run, check, arguments, key):
    path = write_run()
    with pytest.raises(ConfigError) as refusal:
        check(*(argument.replace("{}", str(path)) for argument in arguments))
    assert key in str(refusal.value)


@pytest.mark.parametrize(("command", "change"), PAIRS)
def test_from_composes_to_the_same_run_and_to_the_command_with_a_change(command, change, tmp_path):
    original = write_folder(command, tmp_path)
    again = started_from(original.path)
    assert (again.hash, again.choices) == (original.hash, original.choices)
    keys = {line.partition("=")[0] for line in change}  # an option that is replaced brings its own keys
    kept = [line for line in command if not {line.partition("=")[0], line.partition(".")[0]} & keys]
    assert started_from(original.path, *change).hash == composed([*kept, *change]).hash


def test_from_ignores_keys_that_cannot_change_the_result(tmp_path):
    lines = ("name=mine", "logger=wandb", "data.cache_dir=away", "trainer.ckpt_every=7", "columns=[ppl]", "seed=3")
    assert started_from(write_folder(lines, tmp_path).path).written == composed(["seed=3"]).written


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("simbal.balancing.weight_losses.SimBal", "evil.SimBal", "balancing="),
        ("model: tiny", "model: mine", "model="),
    ],
)
def test_option_missing_from_conf_must_be_given(before, after, key, tmp_path):
    path = write_folder((), tmp_path).path
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=f"set {key}"):
        started_from(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from("'\"\\{}[](),:=~@ \n\tab1.é-+"), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z_]{1,6}", fullmatch=True), inner),
    max_leaves=4,
)  # fmt: skip


@given(VALUES)
def test_literal_is_parsed_to_the_same_value(value):
    (override,) = PARSER.parse_overrides([f"key={literal(value)}"])
    read = override.value()
    assert (read, repr(read)) == (value, repr(value))

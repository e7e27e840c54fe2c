"""`run=FOLDER` goes on with a run wherever it lies."""

import signal
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.cli.resume import run_to_resume as run_of
from simbal.errors import ConfigError
from simbal.runs.folder import RunFolder
from tests import programs
from tests.child_processes import wait_until
from tests.conftest import MARKOV, SMALL
from tests.sweep.small_sweep import curve

LONG = ("trainer.max_steps=120", "trainer.ckpt_every=5", "trainer.val_every=40", "trainer.log_every=1")
EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\nclass SimBal: ...\n"


def again(folder, *lines: str):
    return run_of(folder, OverridesParser.create().parse_overrides([f"run={folder}", *lines]))


def files_of(place: Path) -> dict[str, bytes]:
    return {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_killed_run_that_was_moved_goes_on_to_the_bits_of_one_that_was_left_alone(tmp_path, cache_dir):
    places = {name: tmp_path / name for name in ("whole", "killed", "elsewhere")}
    for place in places.values():
        place.mkdir()
    command = [*SMALL, *MARKOV, *LONG, f"data.cache_dir={cache_dir}"]
    assert programs.run("train.py", *command, cwd=places["whole"]).returncode == 0
    killed = programs.Program("train.py", *command, cwd=places["killed"])
    wait_until(lambda: killed.poll() is not None or [*places["killed"].glob("outputs/*/*/checkpoints/step-*")] != [])
    killed.kill()
    assert killed.completed().returncode == -signal.SIGKILL
    (left,) = places["killed"].glob("outputs/default/*")
    moved = left.rename(places["elsewhere"] / "a run of mine")
    before = files_of(places["killed"])
    asked = (f"run={moved}", f"data.cache_dir={cache_dir}", "trainer.ckpt_every=50")
    ended = programs.run("train.py", *asked, cwd=places["killed"])
    assert ended.returncode == 0, ended.stderr
    assert files_of(places["killed"]) == before
    assert [path.name for path in places["elsewhere"].iterdir()] == [moved.name]
    (whole,) = places["whole"].glob("outputs/default/*")
    assert curve(moved / "metrics.jsonl") == curve(whole / "metrics.jsonl")
    starts = [line for line in (moved / "train.log").read_text().splitlines() if "from step" in line]
    assert "from step 0 " not in starts[-1]
    assert RunFolder(moved).finished(RunFolder(moved).read_spec())
    said = programs.run("train.py", *asked, cwd=places["killed"])
    assert (said.returncode, said.stdout) == (0, f"finished before: {moved}\n")


@pytest.mark.parametrize(
    "override",
    ["trainer.ckpt_every=3", "trainer.progress_bar=false", "logger.kind=tensorboard", "data.threads=2", "name=b"],
)
def test_what_cannot_change_the_result_may_be_given(write_run, override):
    path = write_run()
    run = again(path, override)
    key, _, value = override.partition("=")
    node = run.written
    for part in key.split("."):
        node = node[part]
    assert (str(node).lower(), run.path, run.trusted) == (value, path, False)
    assert run.hash == RunFolder(path).read_spec().hash


def test_another_number_of_devices_is_another_rounding_of_the_same_run(write_run):
    path = write_run(keys={"trainer.micro_batch": 1})
    before = RunFolder(path).read_spec()
    run = again(path, "trainer.devices=2", "trainer.strategy=fsdp")
    assert (run.config.trainer.devices, run.config.trainer.strategy) == (2, "fsdp")
    assert (run.hash, run.written) == (before.hash, before.written)


@pytest.mark.parametrize(
    "lines",
    [
        ["trainer.devices=3"], ["trainer.micro_batch=1"], ["optim.lr=0.5", "name=b"], ["model=small"], ["name=a,b"],
        ["~data.threads"], ["trainer.ckpt_evry=5"], ["trainer.ckpt_every=0"],
    ],
)  # fmt: skip
def test_what_makes_another_run_or_none_is_refused(write_run, lines):
    with pytest.raises(ConfigError) as refusal:
        again(write_run(), *lines)
    assert lines[0] in str(refusal.value)


def test_another_run_is_refused_with_the_command_that_starts_it(write_run):
    path = write_run()
    with pytest.raises(ConfigError, match=f"from={path} seed=7"):
        again(path, "seed=7")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["run={}", "-m"], "-m"), (["run={}", "--cfg", "job"], "--cfg"), (["run={},{}"], "run="),
        (["run=[{},{}]"], "run="), (["run={}", "run={}"], "run="), (["run="], "run="), (["from={},{}"], "from="),
        (["-m", "from={}", "sweeps=league"], "sweeps=league"), (["run={}/nothing"], "run="),
        (["run={}", "dry_run=true"], "dry_run="),
    ],
)  # fmt: skip
def test_a_command_line_that_names_no_single_run_is_refused(write_run, check, arguments, key):
    path = write_run()
    with pytest.raises(ConfigError) as refusal:
        check(*(argument.replace("{}", str(path)) for argument in arguments))
    assert key in str(refusal.value)


@pytest.mark.slow
def test_a_class_outside_simbal_is_not_imported(write_run, tmp_path):
    keys = {"data.documents": 8, "data.validation_tokens": 256, "trainer.accelerator": "cpu"}
    keys["balancing"] = {"simbal": {"_target_": "evil.SimBal", "coef": 0.1}}
    path = write_run(status=None, keys=keys)
    (tmp_path / "evil.py").write_text(EVIL)
    refused = programs.run("train.py", f"run={path}", cwd=tmp_path)
    assert refused.returncode == 1, refused.stdout
    assert "error: balancing.simbal: _target_=evil.SimBal" in refused.stderr
    assert not (tmp_path / "executed").exists()
    assert [file.name for file in path.iterdir()] == ["config.yaml"]

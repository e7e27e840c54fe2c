"""Whatever is typed, it is a run that makes sense or one sentence: never a traceback, never an accepted nonsense."""

import contextlib
import copy
import io
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import CompactHydraException
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from simbal.balancing.composition import build_balancing
from simbal.cli import command_line
from simbal.config.check import checked
from simbal.config.schema import GROUPS
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.runs.spec import RunSpec
from tests.fuzz.sense import require_sense
from tests.run_folders import changed_spec

CONF = Path(__file__).parents[2] / "conf"
with initialize_config_dir(str(CONF), version_base="1.3"):
    BASE = RunSpec.from_hydra(compose("config", ["data=synthetic"], return_hydra_config=True))
KEYS = sorted(flatten(BASE.written))
FLOATS = [key for key, value in flatten(BASE.written).items() if isinstance(value, float)]
FACTS = {"num_layers": 2, "num_experts": 4, "seed": 0}
ODD = ("nonsense", "model.nonsense", "", "balancing.simbal", "data.packages", "a@b")
VALUES = (
    "", "null", "nan", "-nan", "inf", "-inf", "1e999", "-1", "0", "1", "2", "3", "1e400", "true", "no", "abc", "[]",
    "[1,2]", "{}", "{a:1}", "'5'", "'false'", "1.5", "1e-3", str(10**30), str(-(2**60)), "../../x", "/etc", "..", ".",
    "a/b", "a\\b", "~", "${seed}", "${nope}", "${oc.env:HOME}", "???", "x" * 300, "ü", "\u202e", "'\x01'", "2026_10",
    "0x10", "'<script>'", "a b", "-", "=", "0.5,0.6", "[nan,0.5]", "[0.9,-1]", "choice(1,2)", "range(3)", "glob(*)",
    "int(3)", "[[0,1]]", "\udcff", "{_target_:os.system}",
)  # fmt: skip
overrides = st.builds(
    lambda sign, key, value: f"{sign}{key}" if sign == "~" else f"{sign}{key}={value}",
    st.sampled_from(["", "", "", "", "+", "++", "~"]),
    st.sampled_from(
        [*KEYS, *KEYS, *GROUPS, "nonsense", "model.nonsense", "", "balancing.simbal", "data.packages", "a@b"]
    ),
    st.sampled_from(VALUES) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str),
)
python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -1, 0, 1, 2, 4]) | st.floats()
    | st.text(max_size=8) | st.sampled_from([*VALUES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def outcome(*typed: str) -> RunSpec | str:
    """The spec that train.py would run, or the sentence that it would end with."""
    said = io.StringIO()
    with mock.patch.object(sys, "argv", ["train.py", *typed]), contextlib.redirect_stderr(said):
        try:
            command_line.check(CONF, "About.")
            with initialize_config_dir(str(CONF), version_base="1.3"):
                return RunSpec.from_hydra(compose("config", sys.argv[1:], return_hydra_config=True))
        except SystemExit as end:
            return said.getvalue() if end.code == command_line.BAD_USAGE else f"exit code {end.code}"
        except (
            UserError,
            CompactHydraException,
            OmegaConfBaseException,
        ) as error:  # Hydra tells its own without traces
            return f"error: {error}\n"


def require_sentence(said: str) -> None:
    assert said.startswith(("error: ", "usage: "))
    assert 10 < len(said) < 2000


def refused(config: dict[str, Any]) -> bool:
    try:
        checked(config)
    except UserError:
        return True
    return False


@given(st.lists(overrides, min_size=1, max_size=2))
@example(["name=../../x"])
@example(["name=5"])
@example(["name=2026_10"])
@example(["trainer.progress_bar='false'"])
@example(["~optim.lr"])
@example(["~model"])
@example(["output_dir="])
@example(["~balancing.simbal"])
@example(["seed=1_000"])
def test_overrides_are_a_sensible_run_or_a_sentence(typed):
    ended = outcome("data=synthetic", *typed)
    if isinstance(ended, RunSpec):
        require_sense(ended)
    else:
        require_sentence(ended)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_no_key_takes_nan_or_infinity(value):
    for key in FLOATS:
        ended = outcome("data=synthetic", f"{key}={value}")
        assert isinstance(ended, str), key
        assert key in ended


@given(st.sampled_from(KEYS), python_values, st.booleans())
def test_a_config_with_any_value_in_any_place_is_sensible_or_refused(key, value, deleted):
    config = copy.deepcopy(BASE.written)
    *parents, last = key.split(".")
    node = config
    for parent in parents[: None if deleted else len(parents)]:
        node = node[parent]
    node[last] = value
    if deleted:
        del node[last]
    if refused(config):
        return
    require_sense(RunSpec(checked(config), BASE.choices, config))
    with contextlib.suppress(UserError):
        build_balancing(config["balancing"], FACTS, config["trainer"]["max_steps"], "sum")


@given(
    st.sampled_from(["model", "router", "optim", "trainer", "data", "balancing", "experts", "logger"]), python_values
)
def test_a_group_that_is_no_group_is_refused(group, value):
    with pytest.raises(UserError):
        checked(BASE.written | {group: value})


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "..",
        ".",
        "",
        "/etc",
        "a/b",
        "a\\b",
        ".hidden",
        "x\ny",
        "x\0",
        "x" * 201,
        "\udcff",
        5,
        None,
        ["a"],
        True,
    ],
)
def test_a_name_that_leads_out_of_outputs_is_refused(name):
    with pytest.raises(UserError, match="name[=:]"):
        checked(BASE.written | {"name": name})


@pytest.mark.parametrize("name", ["default", "2026-11-21", "a b", "ü", "significance.2", "x" * 200, "-"])
def test_plain_names_are_accepted(name):
    checked(BASE.written | {"name": name})


@given(st.text(max_size=30), st.text(max_size=30))
def test_names_of_strategies_and_models_cannot_lead_out_of_outputs(balancing, model):
    spec = changed_spec(BASE, {}, balancing=balancing, model=model)
    assert spec.path.parent == Path(BASE.config.output_dir, BASE.config.name)
    assert "/" not in spec.path.name


@pytest.mark.parametrize(
    "target",
    ["os.system", "os.abort", "nowhere.at.all", "subprocess.Popen", "", None, 5, "simbal.balancing.base.Properties",
     "simbal.nothing.X", "tests.x.Y", "a b"],
)  # fmt: skip
def test_a_strategy_is_a_strategy_or_a_sentence(target):
    with pytest.raises(UserError, match="names no subclass of simbal.balancing.base.Balancing"):
        build_balancing({"simbal": {"_target_": target, "command": "true"}}, FACTS, 10, "sum")


def test_a_module_in_a_folder_that_is_no_package_is_never_imported(tmp_path, monkeypatch):
    run = tmp_path / "outputs" / "default" / "lbl-tiny-seed0"
    run.mkdir(parents=True)
    (run / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="names no subclass"):
        build_balancing({"x": {"_target_": "outputs.default.lbl-tiny-seed0.evil.X"}}, FACTS, 10, "sum")
    assert not (tmp_path / "pwned").exists()

"""The composer composes each job to the same run as Hydra."""

from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from simbal.runs.spec import RunSpec
from simbal.sweeping.composer import Composer
from tests.composing import cheap_hydra
from tests.conftest import CONF

GROUPS = ("balancing=none", "balancing=lbl", "balancing=[lf,lbl]", "model=small", "logger=wandb", "router=sigmoid")
VALUES = {
    "seed": ("0", "1", "2", "null", "1.0", "'1'"),
    "optim.lr": ("1e-3", "0.001", "1", "nan", "inf", "-1", "text"),
    "optim.betas": ("[0.9,0.95]", "[0.9,1e-1]", "[1]", "[]", "null", "0.9", "[0.9,'a']"),
    "optim.betas.0": ("0.5",),
    "optim[lr]": ("0.5",),
    "optim": ("{lr:2e-3}",),
    "name": (
        "plain", "'quo ted'", "'\"1\"'", "1", "a\\,b", "${seed}x", "'${seed}'", "\\${seed}", "'???'", "", "é", "A/b",
    ),
    "columns": ("null", "[ppl,'min_pes']", "[]", "[[a],1]", "['${name}']", "{a:1}"),
    "output_dir": ("outputs", "'out puts'", "''", "${oc.env:HOME}"),
    "model.top_k": ("1", "2", "99", "2.0", "true"),
    "model": ("tiny", "small", "nowhere"),
    "balancing.lbl.coef": ("0.1", "1e-2", "null"),
    "balancing.lbl": ("{coef:3}", "null"),
    "data.documents": ("64", "65"),
    "data.cache_dir": ("here",),
    "trainer.progress_bar": ("true", "false", "'false'"),
    "logger.tracking_uri": ("null",),
    "hydra.verbose": ("true",),
}  # fmt: skip
OTHERS = ("~optim.lr", "+new=1", "++optim.lr=2", "balancing@model=lbl", "seed=[", "sweeps=null", "nowhere=1")


@pytest.fixture(scope="module")
def sweep() -> Iterator[tuple[ConfigLoader, DictConfig]]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        yield hydra.config_loader, hydra.config_loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)


def by_hydra(loader, master, lines):
    return RunSpec.from_hydra(loader.load_sweep_config(master, [*lines]))


def describe(compose, lines):
    """Return everything about a run, or its error; `repr` distinguishes 1, 1.0 and true."""
    try:
        spec = compose([*lines])
    except (ValueError, HydraException) as error:
        return type(error), str(error)
    return repr(spec), spec.hash, spec.path, spec.written


@st.composite
def jobs(draw):
    """Draw the jobs of one sweep: usually the same keys with different values."""
    groups = draw(st.lists(st.sampled_from(GROUPS), max_size=2))
    others = draw(st.lists(st.sampled_from(OTHERS), max_size=1)) if draw(st.integers(0, 4)) == 0 else []
    keys = draw(st.lists(st.sampled_from([*VALUES]), min_size=1, max_size=4))  # with repetitions
    lines = [[f"{key}={draw(st.sampled_from(VALUES[key]))}" for key in keys] for _ in range(draw(st.integers(2, 4)))]
    order = draw(st.permutations(range(len(keys) + len(groups) + len(others))))
    return [[[*groups, *others, *of_job][place] for place in order] for of_job in lines]


@pytest.mark.slow
@given(jobs=jobs())
def test_every_job_is_composed_as_by_hydra(sweep, jobs):
    composer = Composer(*sweep)
    with cheap_hydra(()):
        for lines in [["data=synthetic", *job] for job in jobs]:
            found = describe(lambda job: composer.job(job).spec, lines)
            assert found == describe(partial(by_hydra, *sweep), lines), lines


@pytest.mark.parametrize(
    ("shared", "num_compositions"),
    [
        (["optim.lr=1"], 1),
        (["name=a${seed}"], 3),
        (["baseline=${oc.env:HOME}"], 3),
        (["optim={lr:1}", "optim.lr=2"], 3),
    ],
)
def test_hydra_composes_each_job_only_if_values_may_depend_on_others(sweep, shared, num_compositions):
    loader, master = sweep
    with mock.patch.object(loader, "load_sweep_config", wraps=loader.load_sweep_config) as load:
        composer = Composer(loader, master)
        seeds = [composer.job(["data=synthetic", *shared, f"seed={seed}"]).spec.config.seed for seed in range(3)]
    assert load.call_count == num_compositions
    assert seeds == [0, 1, 2]

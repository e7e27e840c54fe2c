"""Shared fixtures: specs of runs that train in a second, and settings of the test session."""

import gc
import os
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import HealthCheck, settings
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from simbal.cli import command_line
from simbal.config.messages import raise_config_errors
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.sweeping.composer import Composer
from simbal.training import worker
from simbal.training.failures import RANK_ERROR
from tests import programs
from tests.child_processes import DEADLINE_SECONDS

pytest_plugins = ["tests.run_folders"]

gc.disable()  # during collection, where it would take a tenth of the time and find nothing

# a shell that runs the tests in the background makes them and their children ignore SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)

# no deadlines, as a slow machine is not a failure; `--hypothesis-profile=thorough` is for `make test-all`
UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=20, **UNHURRIED)
settings.register_profile("thorough", max_examples=200, **UNHURRIED)
settings.load_profile("quick")

CONF = Path(__file__).parents[1] / "conf"
SMALL = (
    "model.num_layers=2", "model.d_model=16", "model.num_heads=2", "model.d_expert=8", "model.num_experts=4",
    "model.top_k=2", "trainer.max_steps=12", "trainer.val_every=6", "trainer.val_at=none",
    "trainer.log_every=2", "trainer.ckpt_every=4", "trainer.global_batch=8", "trainer.micro_batch=8",
    "trainer.progress_bar=false", "trainer.accelerator=cpu", "optim.warmup_steps=2", "optim.lr=1e-2", "logger=none",
)  # fmt: skip
MARKOV = (
    "data=synthetic", "data.vocab_size=64", "data.seq_len=16", "data.documents=64", "data.document_tokens=128",
    "data.validation_tokens=512",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests so that each worker starts with its part of the slow ones.

    xdist gives each worker a contiguous part of the list; at the end, idle workers take short tests from the others.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    items[:] = [
        item
        for worker in range(workers)
        for part in (slow, fast)
        for item in part[worker * len(part) // workers : (worker + 1) * len(part) // workers]
    ]


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but only among objects that the tests create."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Give each test the same random inputs, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@cache
def composer() -> Composer:
    """A composer, which calls Hydra once for all specs that differ only in plain values."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        loader = hydra.config_loader
        return Composer(loader, loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN))


def spec_of(output_dir: Path, cache_dir: Path, *overrides: str) -> RunSpec:
    """The spec of a run that takes about a second."""
    data = () if any(override.startswith("data=") for override in overrides) else MARKOV
    places = (f"output_dir={output_dir}", f"data.cache_dir={cache_dir}")
    lines = {line.partition("=")[0]: line for line in (*SMALL, *data, *places, *overrides)}  # the last one wins
    return composer().job([*lines.values()]).spec


@pytest.fixture
def small_spec(tmp_path, cache_dir):
    """Calls `spec_of`: `small_spec("balancing=lbl", output_dir=...)`."""

    def build(*overrides: str, output_dir: Path = tmp_path / "outputs") -> RunSpec:
        return spec_of(output_dir, cache_dir, *overrides)

    return build


@pytest.fixture
def check():
    """Returns the arguments for Hydra, or the run that run= names; raises `ConfigError` for a mistake."""

    def run(*arguments: str, root: str = "config") -> list[str] | RunSpec:
        with raise_config_errors(arguments):
            return command_line.hydra_arguments(arguments, root)

    return run


@pytest.fixture
def forked_ranks(monkeypatch):
    """Makes this process rank zero and the other ranks forks of a server that has imported torch.

    A user's ranks are new Python processes; only some tests start those.
    """

    def run_here(spec: RunSpec) -> None:
        RunFolder(spec.path).write_spec(spec)
        (spec.path / RANK_ERROR).unlink(missing_ok=True)
        context, port = programs.server().context, str(find_free_network_port())
        run = (spec.path, spec.config.trainer.devices, spec.config.trainer.strategy)
        others = [context.Process(target=be_rank, args=(rank, port, *run)) for rank in range(1, run[1])]
        for process in others:
            process.start()
        with monkeypatch.context() as patch:
            for name, value in rank_environment(0, port).items():
                patch.setenv(name, value)
            try:
                worker.main(*run)
            finally:
                for process in others:
                    process.join(0.0 if sys.exc_info()[0] else DEADLINE_SECONDS)
                    process.kill()
                    process.join()
                if dist.is_initialized():
                    dist.destroy_process_group()

    monkeypatch.setattr("simbal.training.run.run_on_ranks", run_here)


def rank_environment(rank: int, port: str) -> dict[str, str]:
    """The variables that tell Lightning that another process has started the ranks."""
    return {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def be_rank(rank: int, port: str, *run: Any) -> None:
    """Run one of the other ranks."""
    os.environ |= rank_environment(rank, port)
    worker.main(*run)

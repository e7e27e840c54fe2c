"""What tests of several folders need: specs as the command line makes them, small enough to train in a second."""

import gc
import os
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
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
from simbal.sweep.composer import Composer
from simbal.training import worker
from simbal.training.failures import RANK_ERROR
from tests import programs
from tests.child_processes import DEADLINE_SECONDS

pytest_plugins = ["tests.run_folders"]

# what modules and tests are made of stays: looking for garbage among it would be a tenth of all the time
gc.disable()

# a shell that runs the tests in the background has them, and all that they start, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)

# a slow machine is no failure; `--hypothesis-profile=thorough` is for the run of everything
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
    """Let each worker begin with its share of the slow tests, of which many wait, and the longest take minutes.

    A worker is given a part of the list without a gap; at the end it takes tests of others, which are short ones then.
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
    """Look for garbage from here on, among what the tests leave."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@cache
def composer() -> Composer:
    """Composes as a sweep does: through Hydra once for all specs that differ in plain values alone."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        loader = hydra.config_loader
        return Composer(loader, loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN))


def spec_of(output_dir: Path, cache_dir: Path, *overrides: str) -> RunSpec:
    """A spec of a run that takes about a second."""
    data = () if any(override.startswith("data=") for override in overrides) else MARKOV
    places = (f"output_dir={output_dir}", f"data.cache_dir={cache_dir}")
    lines = {line.partition("=")[0]: line for line in (*SMALL, *data, *places, *overrides)}  # the last of a key
    return composer().job([*lines.values()]).spec


@pytest.fixture
def small_spec(tmp_path, cache_dir):
    """`small_spec("balancing=lbl", output_dir=...)`: as `spec_of` makes it."""

    def build(*overrides: str, output_dir: Path = tmp_path / "outputs") -> RunSpec:
        return spec_of(output_dir, cache_dir, *overrides)

    return build


@pytest.fixture
def check():
    """The arguments that Hydra sees for those of a program; the run for run=; `ConfigError` for what is refused."""

    def run(*arguments: str, root: str = "config") -> list[str] | RunSpec:
        with raise_config_errors(arguments):
            return command_line.hydra_arguments(arguments, root)

    return run


@pytest.fixture
def forked_ranks(monkeypatch):
    """This process is rank zero, and the others are forks of a server that has imported torch.

    Only some tests start each rank as a new Python, as a user does.
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
    """The variables by which Lightning knows that all ranks are there."""
    return {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def be_rank(rank: int, port: str, *run: Any) -> None:
    """Be one of the other ranks."""
    os.environ |= rank_environment(rank, port)
    worker.main(*run)

"""The warning before a run whose steps will hardly fit into memory."""

from dataclasses import replace

import pytest
import torch

from simbal.cost.memory import Step, device_memory
from simbal.runs.folder import RunFolder
from simbal.training import free_memory
from simbal.training.build import transformer_shape
from simbal.training.free_memory import free_memory as free_now
from simbal.training.free_memory import memory_warning, still_needed
from simbal.training.run import train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MEGABYTE = 2**20


@pytest.fixture
def computer(tmp_path, monkeypatch):
    """`computer(available, **files)`: free bytes that /proc says, and files of control groups by path."""
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "groups")

    def fake(available=None, own="", groups=None, total=2**40, swap=0):
        if available is not None:
            lines = (
                f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\nSwapTotal: {swap // 1024} kB\n"
            )
            (tmp_path / "meminfo").write_text(lines)
        (tmp_path / "cgroup").write_text(own)
        for path, said in (groups or {}).items():
            (tmp_path / "groups" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / path).write_text(said)

    return fake


def alone(shape, step):
    return device_memory("one device", shape, step, 1)


def group(folder, limit, used, droppable, names=free_memory.V2):
    files = dict(zip((*names, "memory.stat"), (limit, used, f"anon 5\ninactive_file {droppable}"), strict=True))
    return {f"{folder}{name}": f"{said}\n" for name, said in files.items()}


def test_free_memory_of_a_computer_is_what_proc_says_is_available(computer):
    computer(512 * MEGABYTE, own="0::/\n")
    assert free_now(CPU) == 512 * MEGABYTE


@pytest.mark.parametrize(
    ("own", "groups", "megabytes"),
    [
        ("0::/\n", group("", 300 * MEGABYTE, 250 * MEGABYTE, 30 * MEGABYTE), 80),  # a container's own at the root
        ("0::/a/b\n", group("a/b/", "max", 1, 0) | group("a/", 300 * MEGABYTE, 200 * MEGABYTE, 0), 100),
        ("0::/a/b\n", group("a/b/", 90 * MEGABYTE, 100 * MEGABYTE, 0), 0),
        ("0::/a\n", group("a/", "max", 1, 0), 512),
        (
            "7:blkio:/\n4:memory:/a\n0::/\n",
            group("memory/", 2**63 - 4096, 1, 0, free_memory.V1)
            | group("memory/a/", 70 * MEGABYTE, 10 * MEGABYTE, 0, free_memory.V1),
            60,
        ),
    ],
)
def test_a_control_group_leaves_less_if_it_has_a_limit_of_its_own_or_above_it(computer, own, groups, megabytes):
    computer(512 * MEGABYTE, own, groups)
    assert free_now(CPU) == megabytes * MEGABYTE


def test_where_nothing_says_what_is_free_nothing_is_warned_of(computer, small_spec):
    computer()
    assert free_now(CPU) is None
    spec = small_spec()
    assert memory_warning(spec, transformer_shape(spec, 0), "torch", CPU, "32-true") is None


@pytest.mark.skipif(not free_memory.MEMINFO.exists(), reason="there is no /proc/meminfo")
def test_this_machine_has_free_memory_and_a_small_run_fits(small_spec):
    spec = small_spec()
    assert free_now(CPU) > MEGABYTE
    assert memory_warning(spec, transformer_shape(spec, 0), "torch", CPU, "32-true") is None


def test_the_largest_micro_batch_that_fits_is_named(computer, small_spec):
    spec = small_spec("trainer.global_batch=64", "trainer.micro_batch=64", "data.seq_len=128")
    shape = transformer_shape(spec, 0)
    step = Step(64, 128, False)
    of_16 = alone(shape, replace(step, micro_batch=16, accumulates=True))
    computer(still_needed(of_16, CPU, 1) + MEGABYTE // 4)
    said = memory_warning(spec, shape, "torch", CPU, "32-true")
    assert said.endswith("trainer.micro_batch=16 would fit")
    assert "with trainer.micro_batch=64" in said
    assert "\n" not in said
    computer(still_needed(alone(shape, step), CPU, 1) + MEGABYTE)
    assert memory_warning(spec, shape, "torch", CPU, "32-true") is None


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_where_no_micro_batch_fits_the_model_is_to_be_smaller(computer, small_spec, backend):
    spec = small_spec()
    computer(4096)
    said = memory_warning(spec, transformer_shape(spec, 0), backend, CPU, "32-true")
    assert said.endswith("no micro-batch would fit: use a smaller data.seq_len or a smaller model")


def test_a_gpu_still_needs_the_weights_and_is_asked_itself(small_spec, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4096, 80 * 2**30))
    spec = small_spec()
    shape = transformer_shape(spec, 0)
    cost = alone(shape, Step(8, 16, False, "bf16-mixed", "torch", "cuda"))
    assert still_needed(cost, CUDA, 1) == cost.peak == still_needed(cost, CPU, 1) + cost.weights
    assert "are free on the GPU" in memory_warning(spec, shape, "torch", CUDA, "bf16-mixed")


def test_a_run_that_may_not_fit_says_so_on_the_screen_in_its_log_and_in_its_record(computer, small_spec, capsys):
    spec = small_spec()
    computer(4096)
    train(spec)
    (said,) = RunFolder(spec.path).read_record()["warnings"]
    assert said.startswith("training is estimated to need ")
    assert f"warning: {said}" in capsys.readouterr().out
    assert f"warning: {said}" in (spec.path / "train.log").read_text()


def test_processes_of_one_computer_share_its_memory_and_fsdp_needs_less_of_it(computer, small_spec):
    shape = transformer_shape(small_spec(), 0)
    needs = {}
    for strategy in ("ddp", "fsdp"):
        keys = ("trainer.devices=2", f"trainer.strategy={strategy}", "trainer.micro_batch=4")
        computer(0, own="0::/\n")
        said = memory_warning(small_spec(*keys), shape, "torch", CPU, "32-true")
        assert "trainer.micro_batch=4" in said
        memory = device_memory(strategy, shape, Step(4, 16, False, "32-true", "torch"), 2)
        needs[strategy] = still_needed(memory, CPU, 2)
        computer(needs[strategy] + MEGABYTE, own="0::/\n")
        assert memory_warning(small_spec(*keys), shape, "torch", CPU, "32-true") is None
    assert needs["fsdp"] < needs["ddp"]

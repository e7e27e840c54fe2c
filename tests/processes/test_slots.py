"""One core, or one GPU, is one slot, unless the user says otherwise."""

import importlib.metadata

import pytest

from simbal.errors import UserError
from simbal.processes import slots


def test_a_cpu_machine_has_a_slot_of_one_thread_per_core():
    assert slots.cpu_slots(4, None, None) == [dict.fromkeys(slots.THREADS, "1")] * 4


def test_more_threads_make_fewer_slots_and_n_jobs_wins():
    assert len(slots.cpu_slots(8, None, 4)) == 2
    assert len(slots.cpu_slots(2, None, 4)) == 1
    assert slots.cpu_slots(8, 3, 4) == [dict.fromkeys(slots.THREADS, "4")] * 3


@pytest.mark.parametrize(
    ("gpus", "n_jobs", "seen"),
    [
        (None, None, ["4", "5", "6", "7"]),
        (None, 2, ["4", "5"]),
        (None, 6, ["4", "5", "6", "7", "4", "5"]),
        (["1", "3"], None, ["5", "7"]),
        (["0+1", "2+3"], None, ["4,5", "6,7"]),
    ],
)
def test_gpu_slots_are_places_among_the_visible_ones(gpus, n_jobs, seen):
    assert [slot[slots.VISIBLE] for slot in slots.gpu_slots("4567", gpus, n_jobs, None)] == seen


@pytest.mark.parametrize("gpus", [["4"], ["0+9"], ["-1"], ["a"], [""]])
def test_a_gpu_that_is_not_there_is_an_error_that_says_which_are(gpus):
    with pytest.raises(UserError, match=r"hydra.launcher.gpus.*0 to 3"):
        slots.gpu_slots("4567", gpus, None, None)


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({}, ["0", "1"]),
        ({slots.VISIBLE: "1"}, ["1"]),
        ({slots.VISIBLE: "GPU-8a, GPU-9b"}, ["GPU-8a", "GPU-9b"]),
        ({slots.VISIBLE: ""}, []),
        ({slots.VISIBLE: "-1"}, []),
    ],
)
def test_visible_gpus_are_the_devices_present_less_those_hidden(tmp_path, monkeypatch, environment, visible):
    for device in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / device).touch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    assert slots.visible_gpus(environment, tmp_path) == visible
    assert slots.visible_gpus(environment, tmp_path / "none") == []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert slots.visible_gpus(environment, tmp_path) == []


def test_a_container_with_a_quota_has_fewer_cores(tmp_path):
    quota = tmp_path / "cpu.max"
    free = slots.usable_cores(quota)
    quota.write_text("max 100000\n")
    assert slots.usable_cores(quota) == free
    quota.write_text("50000 100000\n")
    assert slots.usable_cores(quota) == 1

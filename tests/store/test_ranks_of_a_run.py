"""Runs of several processes in a store: one of them has the run there for all, and what it finds out all find out."""

import os
import shutil
import signal
import socket
from dataclasses import replace

import pytest

from simbal.errors import BUSY
from simbal.store.bucket import Bucket
from simbal.store.history import History
from tests import programs
from tests.child_processes import wait_until
from tests.store.test_elsewhere import machine, server, the_run  # noqa: F401  fixtures
from tests.training.run_files import assert_same_run

pytestmark = pytest.mark.slow
PAIR = ("trainer.devices=2", "trainer.micro_batch=2", "logger=none")
RANKS = range(2)


def launched(folder, arguments):
    """The processes of a run as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [programs.Program("train.py", *arguments, cwd=folder, RANK=str(rank), **same) for rank in RANKS]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_that_is_killed_goes_on_elsewhere_to_the_same_bits(strategy, server, machine):  # noqa: F811
    keys = (*PAIR, f"trainer.strategy={strategy}", "trainer.max_steps=30")
    straight, arguments = machine("straight", *keys)
    assert programs.run("train.py", *arguments, cwd=straight).returncode == 0

    store = f"store=s3://{server.bucket}/{strategy}"
    first, arguments = machine("first", *keys, store)
    server.fails(r"PUT .*/history/00000004\.json", "hang", 100)  # the third checkpoint
    running = programs.Program("train.py", *arguments, cwd=first)
    wait_until(lambda: server.hanging.is_set() or running.poll() is not None)
    assert running.poll() is None, running.communicate()
    os.killpg(running.pid, signal.SIGKILL)
    running.completed()
    server.faults.clear()
    shutil.rmtree(first)

    second, arguments = machine("second", *keys, store)
    again = programs.run("train.py", *arguments, cwd=second)
    assert again.returncode == 0, again.stderr
    assert "going on from step 14 of 30" in again.stdout
    assert_same_run(the_run(straight), the_run(second))


def test_a_finished_run_is_finished_for_all_its_processes_elsewhere(server, machine):  # noqa: F811
    keys = (*PAIR, "trainer.max_steps=2", f"store=s3://{server.bucket}/finished")
    first, arguments = machine("first", *keys)
    assert programs.run("train.py", *arguments, cwd=first).returncode == 0

    second, arguments = machine("second", *keys)
    ends = [rank.completed() for rank in launched(second, arguments)]
    assert [end.returncode for end in ends] == [0, 0], ends
    assert ends[0].stdout.startswith("finished by another process: ")
    assert_same_run(the_run(first), the_run(second))


def test_all_processes_of_a_run_that_another_machine_has_taken_over_end_and_change_nothing(machine, tmp_path):  # noqa: F811
    url = f"file://{tmp_path}/store"
    folder, arguments = machine("first", *PAIR, f"store={url}", "trainer.max_steps=10000", "trainer.ckpt_every=2")
    ranks = launched(folder, arguments)

    def history():
        (run,) = Bucket(url).folders("mine")
        return History(Bucket(url), f"mine/{run}")

    wait_until(lambda: Bucket(url).folders("mine") and history().last().step >= 2)
    ranks[0].send_signal(signal.SIGSTOP)
    other = history().append(replace(history().last(), writer="b", holder="process 1 on b", process=(1, "b")))
    ranks[0].send_signal(signal.SIGCONT)
    ends = [rank.completed() for rank in ranks]
    assert [end.returncode for end in ends] == [BUSY, BUSY], ends
    assert "was taken over by process 1 on b" in ends[0].stderr
    assert history().last() == other
    assert not [*folder.rglob("record.json")]

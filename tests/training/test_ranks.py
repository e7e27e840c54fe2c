"""Ranks share why one of them failed, and end together."""

import sys
import threading
from multiprocessing import get_context

import pytest
from torch.distributed import HashStore, TCPStore

from simbal.training import ranks
from simbal.training.ranks import Ranks


@pytest.fixture
def pair(monkeypatch):
    """The two ranks of a group, by rank."""
    monkeypatch.setattr(ranks, "WAIT_SECONDS", 0.05)
    store = HashStore()
    return Ranks(0, 2, store), Ranks(1, 2, store)


def test_the_first_report_is_the_one_that_counts(pair):
    first, second = pair
    second.report_failure("the disk is full")
    first.report_failure("rank 1 has gone")
    assert first.failure_of_others() == "the disk is full"


def test_without_a_report_there_is_none(pair):
    assert pair[0].failure_of_others() is None


def test_a_thread_can_report_while_another_looks_for_reports():
    """As the one that watches the other ranks does; a wait of torch's store would lock it out."""
    first = Ranks(0, 2, TCPStore(ranks.HOST, 0, 2, is_master=True, wait_for_workers=False))
    watcher = threading.Timer(3 * ranks.LOOK_SECONDS, first.report_failure, ["rank 1 has gone"])
    watcher.start()
    assert first.failure_of_others() == "rank 1 has gone"
    watcher.join()


def test_a_process_alone_has_nobody_to_report_to():
    Ranks().report_failure("it failed")
    assert Ranks().failure_of_others() is None


def test_the_first_rank_ends_with_one_that_it_waits_for_and_not_once_they_have_parted(monkeypatch):
    gone, also_gone = (get_context("fork").Process(target=sys.exit, args=(1,)) for _ in range(2))
    for process in (gone, also_gone):
        process.start()
        process.join()
    ended = []
    monkeypatch.setattr(ranks.os, "_exit", ended.append)
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.0)
    parted = Ranks(0, 2)
    parted.parted.set()
    ranks._watch([gone], parted)
    assert ended == []
    ranks._watch([also_gone], Ranks(0, 2))
    assert ended == [1]

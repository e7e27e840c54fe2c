"""Ranks share why one of them failed, and end together."""

import sys
from multiprocessing import get_context

import pytest
from torch.distributed import HashStore

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

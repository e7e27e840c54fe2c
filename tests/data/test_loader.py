from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.data.loader import TrainBatches, ValidationSplit, batch_windows, windows_of
from simbal.errors import UserError

TOKENS = np.arange(1000, dtype=np.uint16)  # a window of TOKENS starts with its own position
SEQ_LEN, GLOBAL_BATCH, NUM_WINDOWS = 10, 8, 99


def batches(**changed) -> TrainBatches:
    arguments = {"seed": 0, "global_batch": GLOBAL_BATCH, "micro_batch": 8, "max_steps": 30, **changed}
    return TrainBatches(windows_of(TOKENS, SEQ_LEN), "fingerprint", **arguments)


def steps(loader, accumulation) -> list[list[int]]:
    """Which windows each optimizer step saw, in order."""
    seen = [(batch[:, 0] // SEQ_LEN).tolist() for batch in loader]
    return [joined(seen[i : i + accumulation]) for i in range(0, len(seen), accumulation)]


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def test_a_window_shares_its_last_token_with_the_next_one():
    windows = windows_of(TOKENS[:31], SEQ_LEN)
    assert windows[:, 0].tolist() == [0, 10, 20]
    assert windows[:, -1].tolist() == [10, 20, 30]
    assert len(windows_of(TOKENS[:30], SEQ_LEN)) == 2
    assert len(windows_of(TOKENS[:10], SEQ_LEN)) == 0


def test_a_batch_holds_whole_windows_as_int64():
    (batch,) = batches(max_steps=1)
    assert (batch.shape, batch.dtype) == ((8, SEQ_LEN + 1), torch.int64)
    assert (batch - batch[:, :1] == torch.arange(SEQ_LEN + 1)).all()


def test_the_order_of_seed_0_never_changes():
    assert batch_windows(seed=0, step=0, num_windows=NUM_WINDOWS, global_batch=8).tolist() == [
        81,
        36,
        20,
        5,
        92,
        16,
        93,
        52,
    ]
    assert batch_windows(seed=0, step=12, num_windows=NUM_WINDOWS, global_batch=8).tolist() == [
        65,
        45,
        69,
        50,
        18,
        86,
        80,
        9,
    ]


def test_a_step_is_a_function_of_seed_and_step_alone():
    in_order = [batch_windows(3, step, NUM_WINDOWS, 8).tolist() for step in range(30)]
    backwards = [batch_windows(3, step, NUM_WINDOWS, 8).tolist() for step in reversed(range(30))]
    assert in_order == backwards[::-1] == steps(batches(seed=3), 1)


def test_seeds_differ():
    assert steps(batches(seed=0), 1) != steps(batches(seed=1), 1)


def test_an_epoch_shows_no_window_twice_and_the_next_one_has_another_order():
    seen = steps(batches(), 1)
    first, second = joined(seen[:12]), joined(seen[12:24])
    assert len(set(first)) == len(first) == 12 * GLOBAL_BATCH
    assert len(set(second)) == len(second)
    assert first != second


@pytest.mark.parametrize(("micro_batch", "world_size"), [(4, 1), (1, 1), (8, 1), (2, 2), (4, 2), (1, 4)])
def test_ranks_and_accumulation_only_divide_a_step_among_themselves(micro_batch, world_size):
    accumulation = GLOBAL_BATCH // (micro_batch * world_size)
    ranks = [
        steps(batches(micro_batch=micro_batch, rank=rank, world_size=world_size), accumulation)
        for rank in range(world_size)
    ]
    together = [Counter(joined(parts)) for parts in zip(*ranks, strict=True)]
    assert together == [Counter(step) for step in steps(batches(), 1)]


def test_a_step_that_ranks_cannot_share_evenly_is_refused():
    with pytest.raises(UserError, match="global_batch=8 must be a multiple of trainer.micro_batch=3 times 1 devices"):
        batches(micro_batch=3)


@pytest.mark.parametrize(("before", "after"), [(8, 8), (4, 4), (4, 8), (8, 2)])
def test_a_restored_loader_goes_on_with_the_next_step(before, after):
    first, second = batches(micro_batch=before), batches(micro_batch=after)
    iterator = iter(first)
    for _ in range(5 * GLOBAL_BATCH // before):
        next(iterator)
    second.load_state_dict(first.state_dict())
    assert steps(second, GLOBAL_BATCH // after) == steps(batches(), 1)[5:]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"global_batch": 16}], ids=str)
def test_a_state_of_other_batches_is_refused(changed):
    with pytest.raises(UserError, match=f"the checkpoint was trained with {next(iter(changed))}=0?8?, not"):
        batches(**changed).load_state_dict(batches().state_dict())


def test_a_state_of_other_data_is_refused():
    other = TrainBatches(windows_of(TOKENS, SEQ_LEN), "other", 0, GLOBAL_BATCH, 8, 30)
    with pytest.raises(UserError, match="tokens_fingerprint=other, not fingerprint"):
        batches().load_state_dict(other.state_dict())


def test_a_state_taken_inside_a_step_is_refused():
    loader = batches(micro_batch=4)
    next(iter(loader))
    with pytest.raises(UserError, match="taken inside step 0"):
        batches().load_state_dict(loader.state_dict())


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 16), (2, 16), (3, 16), (2, 1), (4, 3), (70, 1)])
def test_validation_windows_come_in_file_order_each_to_one_rank(world_size, micro_batch):
    split = ValidationSplit(windows_of(TOKENS, SEQ_LEN), np.array([1000], np.uint64), 0)
    ranks = [split.batches(None, micro_batch, rank, world_size) for rank in range(world_size)]
    for rank, loader in enumerate(ranks):
        found = [*loader]
        seen = [(batch.windows_BT[:, 0] // SEQ_LEN).tolist() for batch in found if len(batch.documents_BS)]
        assert joined(seen) == list(range(rank, NUM_WINDOWS, world_size))
        assert len(found) == len(loader) == len(ranks[0]), "all ranks run the model as often"
        assert all(len(batch.windows_BT) for batch in found)
        assert {len(batch) for batch in seen[:-1]} <= {micro_batch}


ENDS = np.array([15, 16, 400, 1000], np.uint64)


def test_each_target_has_the_document_that_holds_it():
    split = ValidationSplit(windows_of(TOKENS, SEQ_LEN), ENDS, 0)
    (batch, *_) = split.batches(None, 2)
    documents_of_tokens = np.repeat([0, 1, 2, 3], [15, 1, 384, 600])
    assert batch.documents_BS.tolist() == documents_of_tokens[batch.windows_BT[:, 1:]].tolist()
    assert (batch.documents_BS.dtype, batch.documents_BS.shape) == (torch.int64, (2, SEQ_LEN))


@given(st.integers(0, 2**32), st.integers(1, 1200), st.integers(1, 1200))
def test_drawn_windows_are_in_file_order_and_a_smaller_part_is_in_a_larger_one(seed, few, many):
    split = ValidationSplit(windows_of(TOKENS, SEQ_LEN), ENDS, seed)
    part, whole = (split.drawn(tokens).tolist() for tokens in sorted((few, many)))
    assert part == sorted(set(part))
    assert set(part) <= set(whole) <= set(range(NUM_WINDOWS))
    assert len(part) == min(NUM_WINDOWS, max(1, min(few, many) // SEQ_LEN))


def test_windows_are_drawn_over_the_whole_split_alike():
    """Each of 99 windows is in a draw of 33 with probability 1/3: 3,000 draws, within 5 standard errors of 1000."""
    split = ValidationSplit(windows_of(TOKENS, SEQ_LEN), ENDS, 0)
    drawn = np.zeros(NUM_WINDOWS)
    for seed in range(3000):
        drawn[replace(split, seed=seed).drawn(330)] += 1
    assert abs(drawn - 1000).max() < 5 * np.sqrt(3000 * 2 / 9)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 80), st.integers(0, 9))
def test_windows_beyond_the_first_tokens_of_their_documents_are_left_out(lengths, document_tokens, seed):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    split = ValidationSplit(windows_of(tokens, SEQ_LEN), np.cumsum(lengths, dtype=np.uint64), seed, document_tokens)
    place = np.concatenate([np.arange(length) for length in lengths])  # of each token in its document
    some_W = [bool((place[window_T[1:]] < document_tokens).any()) for window_T in split.windows_WT]
    assert split.drawn(None).tolist() == np.flatnonzero(some_W).tolist()
    assert set(split.drawn(3 * SEQ_LEN)) <= set(split.drawn(None))
    assert len(split.drawn(3 * SEQ_LEN)) == min(sum(some_W), 3)

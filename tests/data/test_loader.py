"""Batches depend only on the seed and the step, even after a resume; validation is a uniform sample."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Callback, LightningModule, Trainer

from simbal.data.loader import TokenData, TrainBatches, ValidationSplit, batch_windows, split_into_windows
from simbal.data.prepare import prepare
from simbal.errors import UserError
from simbal.training.warnings import DeviceChanges

TOKENS = np.arange(1000, dtype=np.uint16)  # a window of TOKENS starts with its own position
SEQ_LEN, GLOBAL_BATCH, NUM_WINDOWS = 10, 8, 99
ENDS = np.array([15, 16, 400, 1000], np.uint64)


def batches(fingerprint="fingerprint", **changed) -> TrainBatches:
    arguments = {"seed": 0, "global_batch": GLOBAL_BATCH, "micro_batch": 8, "max_steps": 30, **changed}
    return TrainBatches(split_into_windows(TOKENS, SEQ_LEN), fingerprint, **arguments)


def steps(loader, accumulation) -> list[list[int]]:
    """The windows of each optimizer step, in order."""
    seen = [(batch[:, 0] // SEQ_LEN).tolist() for batch in loader]
    return [joined(seen[i : i + accumulation]) for i in range(0, len(seen), accumulation)]


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def test_a_window_shares_its_last_token_with_the_next_one():
    windows = split_into_windows(TOKENS[:31], SEQ_LEN)
    assert windows[:, 0].tolist() == [0, 10, 20]
    assert windows[:, -1].tolist() == [10, 20, 30]
    assert [len(split_into_windows(TOKENS[:size], SEQ_LEN)) for size in (30, 10)] == [2, 0]
    (batch,) = batches(max_steps=1)
    assert (batch.shape, batch.dtype) == ((8, SEQ_LEN + 1), torch.int64)


def test_the_order_of_seed_0_never_changes():
    first, thirteenth = (batch_windows(0, step, NUM_WINDOWS, 8).tolist() for step in (0, 12))
    assert first == [81, 36, 20, 5, 92, 16, 93, 52]
    assert thirteenth == [65, 45, 69, 50, 18, 86, 80, 9]


def test_a_step_depends_on_the_seed_and_its_number_only():
    in_order = [batch_windows(3, step, NUM_WINDOWS, 8).tolist() for step in range(30)]
    backwards = [batch_windows(3, step, NUM_WINDOWS, 8).tolist() for step in reversed(range(30))]
    assert in_order == backwards[::-1] == steps(batches(seed=3), 1)
    assert in_order != steps(batches(seed=0), 1)


def test_an_epoch_shows_no_window_twice_and_the_next_one_has_another_order():
    seen = steps(batches(), 1)
    first, second = joined(seen[:12]), joined(seen[12:24])
    assert len(set(first)) == len(first) == 12 * GLOBAL_BATCH
    assert len(set(second)) == len(second)
    assert first != second


@pytest.mark.parametrize(("micro_batch", "world_size"), [(1, 1), (8, 1), (2, 2), (4, 2), (1, 4)])
def test_ranks_and_micro_batches_divide_the_same_step(micro_batch, world_size):
    accumulation = GLOBAL_BATCH // (micro_batch * world_size)
    ranks = [
        steps(batches(micro_batch=micro_batch, rank=rank, world_size=world_size), accumulation)
        for rank in range(world_size)
    ]
    together = [Counter(joined(parts)) for parts in zip(*ranks, strict=True)]
    assert together == [Counter(step) for step in steps(batches(), 1)]
    with pytest.raises(UserError, match="global_batch=8 must be a multiple of trainer.micro_batch=3 times 1 devices"):
        batches(micro_batch=3)


@pytest.mark.parametrize(("before", "after"), [(8, 8), (4, 8), (8, 2)])
def test_a_restored_loader_continues_with_the_next_step(before, after):
    first, second = batches(micro_batch=before), batches(micro_batch=after)
    iterator = iter(first)
    for _ in range(5 * GLOBAL_BATCH // before):
        next(iterator)
    second.load_state_dict(first.state_dict())
    assert steps(second, GLOBAL_BATCH // after) == steps(batches(), 1)[5:]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"global_batch": 16}, {"fingerprint": "other"}], ids=str)
def test_a_state_of_other_batches_is_refused(changed):
    with pytest.raises(UserError, match=f"the checkpoint was trained with [a-z_]*{next(iter(changed))}="):
        batches(**changed).load_state_dict(batches().state_dict())


def test_a_state_saved_inside_a_step_is_refused():
    loader = batches(micro_batch=4)
    next(iter(loader))
    with pytest.raises(UserError, match="saved inside step 0"):
        batches().load_state_dict(loader.state_dict())


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 16), (2, 16), (2, 1), (4, 3), (70, 1)])
def test_validation_windows_are_in_file_order_and_each_on_one_rank(world_size, micro_batch):
    split = ValidationSplit(split_into_windows(TOKENS, SEQ_LEN), np.array([1000], np.uint64), 0)
    ranks = [split.batches(None, micro_batch, rank, world_size) for rank in range(world_size)]
    for rank, loader in enumerate(ranks):
        found = [*loader]
        seen = [(batch.windows_BT[:, 0] // SEQ_LEN).tolist() for batch in found if len(batch.documents_BS)]
        assert joined(seen) == list(range(rank, NUM_WINDOWS, world_size))
        assert len(found) == len(loader) == len(ranks[0]), "all ranks run the model equally often"
        assert all(len(batch.windows_BT) for batch in found)
        assert {len(batch) for batch in seen[:-1]} <= {micro_batch}


def test_each_target_has_the_document_that_contains_it():
    split = ValidationSplit(split_into_windows(TOKENS, SEQ_LEN), ENDS, 0)
    (batch, *_) = split.batches(None, 2)
    documents_of_tokens = np.repeat([0, 1, 2, 3], [15, 1, 384, 600])
    assert batch.documents_BS.tolist() == documents_of_tokens[batch.windows_BT[:, 1:]].tolist()
    assert (batch.documents_BS.dtype, batch.documents_BS.shape) == (torch.int64, (2, SEQ_LEN))


@given(st.integers(0, 2**32), st.integers(1, 1200), st.integers(1, 1200))
def test_a_sample_is_in_file_order_and_a_subset_of_any_larger_one(seed, few, many):
    split = ValidationSplit(split_into_windows(TOKENS, SEQ_LEN), ENDS, seed)
    smaller, larger = (split.sample(tokens).tolist() for tokens in sorted((few, many)))
    assert smaller == sorted(set(smaller))
    assert set(smaller) <= set(larger) <= set(range(NUM_WINDOWS))
    assert len(smaller) == min(NUM_WINDOWS, max(1, min(few, many) // SEQ_LEN))


def test_samples_are_uniform_over_the_split():
    """Each of 99 windows is in a sample of 33 with probability 1/3: 1,000 samples, within 5 standard errors."""
    split = ValidationSplit(split_into_windows(TOKENS, SEQ_LEN), ENDS, 0)
    counts = np.zeros(NUM_WINDOWS)
    for seed in range(1000):
        counts[replace(split, seed=seed).sample(330)] += 1
    assert abs(counts - 1000 / 3).max() < 5 * np.sqrt(1000 * 2 / 9)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 80), st.integers(0, 9))
def test_windows_beyond_the_first_tokens_of_their_documents_are_excluded(lengths, document_tokens, seed):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    ends = np.cumsum(lengths, dtype=np.uint64)
    split = ValidationSplit(split_into_windows(tokens, SEQ_LEN), ends, seed, document_tokens)
    position = np.concatenate([np.arange(length) for length in lengths])  # of each token in its document
    included_W = [bool((position[window_T[1:]] < document_tokens).any()) for window_T in split.windows_WT]
    assert split.sample(None).tolist() == np.flatnonzero(included_W).tolist()
    assert set(split.sample(3 * SEQ_LEN)) <= set(split.sample(None))
    assert len(split.sample(3 * SEQ_LEN)) == min(sum(included_W), 3)


@pytest.fixture(scope="module")
def markov(load_keys, tmp_path_factory):
    """8,208 training tokens and 1,026 validation tokens."""
    keys = {"documents": 16, "document_tokens": 512, "validation_one_in": 8, "vocab_size": 64}
    return prepare(load_keys("synthetic", tmp_path_factory.mktemp("cache"), **keys), progress=False)


@pytest.fixture
def data(markov):
    """`data(seq_len=32)`: the batches of the chain."""

    def make(**changed) -> TokenData:
        arguments = {"seed": 0, "seq_len": 64, "global_batch": 8, "micro_batch": 4, "max_steps": 8}
        return TokenData(markov, **{**arguments, "validation_tokens": None, **changed})

    return make


def test_validation_is_limited_to_the_given_tokens(data):
    def windows(**changed):
        return torch.cat([batch.windows_BT for batch in data(**changed).val_dataloader()])

    assert len(windows()) == 16
    few = windows(validation_tokens=5 * 64 + 63)
    assert len(few) == 5
    assert all(any(torch.equal(window, other) for other in windows()) for window in few)
    assert not torch.equal(few, windows(validation_tokens=5 * 64, seed=1))
    assert len(windows(validation_tokens=10**9)) == 16
    assert data().steps_per_epoch == (8208 - 1) // 64 // 8


def test_a_split_smaller_than_a_batch_is_refused(data):
    with pytest.raises(UserError, match="train data have 8208 tokens, 128 windows of data.seq_len=64, .* needs 129"):
        data(global_batch=129, micro_batch=1)
    with pytest.raises(UserError, match="validation data have 1026 tokens, 0 windows .* a batch needs 1"):
        data(seq_len=1026, global_batch=1, micro_batch=1)


class Recorder(LightningModule):
    """Trains one number and records every batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = {}, []

    def training_step(self, batch):
        self.seen.setdefault(self.global_step, []).extend(batch.tolist())
        return self.weight * batch.float().mean()

    def validation_step(self, batch):
        self.validated.extend(batch.windows_BT.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAndStop(Callback):
    """Saves a checkpoint after a step and ends the training there, as a kill would."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(tokens: TokenData, micro_batch: int, folder, *callbacks, checkpoint=None):
    module = Recorder()
    trainer = Trainer(
        max_steps=8, max_epochs=-1, accumulate_grad_batches=8 // micro_batch, val_check_interval=8 // micro_batch * 4,
        check_val_every_n_epoch=None, callbacks=list(callbacks), use_distributed_sampler=False, accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, tokens, ckpt_path=checkpoint)
    return module


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 8), (8, 2)])  # as on half or four times the devices
def test_a_resumed_lightning_run_sees_the_batches_of_an_uninterrupted_one(data, tmp_path, before, after):
    whole = fit(data(micro_batch=after), after, tmp_path)
    checkpoint = tmp_path / "step.ckpt"
    begun = fit(data(micro_batch=before), before, tmp_path, SaveAndStop(3, checkpoint))
    resumed = fit(data(micro_batch=after), after, tmp_path, DeviceChanges(), checkpoint=checkpoint)
    assert sorted(begun.seen) == list(range(3))
    assert {**begun.seen, **resumed.seen} == whole.seen
    assert sorted(whole.seen) == list(range(8))
    windows = [window.tolist() for batch in data().val_dataloader() for window in batch.windows_BT]
    assert whole.validated[: len(windows)] == windows, "each validation covers every window once"

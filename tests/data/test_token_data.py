"""A store's batches as Lightning takes them, kills included."""

from itertools import chain

import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from simbal.data.loader import TokenData
from simbal.data.store import prepare
from simbal.errors import UserError
from simbal.training.callbacks import DeviceChanges


@pytest.fixture(scope="module")
def markov(load_keys, tmp_path_factory):
    """8,208 training tokens and 1,026 held out."""
    keys = {"documents": 16, "document_tokens": 512, "validation_one_in": 8, "vocab_size": 64}
    return prepare(load_keys("synthetic", tmp_path_factory.mktemp("cache"), **keys), progress=False)


@pytest.fixture
def data(markov):
    """`data(seq_len=32)`: batches of the chain."""

    def make(**changed) -> TokenData:
        arguments = {"seed": 0, "seq_len": 64, "global_batch": 8, "micro_batch": 4, "max_steps": 20}
        return TokenData(markov, **{**arguments, "validation_tokens": None, **changed})

    return make


def test_validation_is_cut_to_the_tokens_asked_for(data):
    def held_out(**changed):
        return torch.cat([batch.windows_BT for batch in data(**changed).val_dataloader()])

    assert len(held_out()) == 16
    few = held_out(validation_tokens=5 * 64 + 63)
    assert len(few) == 5
    assert all(any(torch.equal(window, other) for other in held_out()) for window in few)
    assert not torch.equal(few, held_out(validation_tokens=5 * 64, seed=1))
    assert len(held_out(validation_tokens=10**9)) == 16


def test_an_epoch_is_as_many_steps_as_whole_batches_fit(data):
    assert data().steps_per_epoch == (8208 - 1) // 64 // 8


def test_a_corpus_smaller_than_a_batch_is_refused_in_either_split(data):
    with pytest.raises(UserError, match="train data hold 8208 tokens, .* 128 windows of data.seq_len=64, .* needs 129"):
        data(global_batch=129, micro_batch=1)
    with pytest.raises(UserError, match="validation data hold 1026 tokens, that is 0 windows .* a batch needs 1"):
        data(seq_len=1026, global_batch=1, micro_batch=1)


class Recorder(LightningModule):
    """Trains one number and remembers every micro-batch and how it was accumulated."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = [], []

    def training_step(self, batch):
        self.seen.append((self.global_step, batch.tolist()))
        return self.weight * batch.float().mean()

    def validation_step(self, batch):
        self.validated.append(batch.windows_BT.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def by_step(self):
        steps = {}
        for step, batch in self.seen:
            steps.setdefault(step, []).extend(batch)
        return steps


class SaveAndStop(Callback):
    """Checkpoints after a step and ends the training there, as a kill would."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(tokens: TokenData, micro_batch: int, folder, *callbacks, checkpoint=None):
    module = Recorder()
    trainer = Trainer(
        max_steps=20, max_epochs=-1, accumulate_grad_batches=8 // micro_batch, val_check_interval=8 // micro_batch * 4,
        check_val_every_n_epoch=None, callbacks=list(callbacks), use_distributed_sampler=False, accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, tokens, ckpt_path=checkpoint)
    return module


@pytest.mark.parametrize(("before", "after"), [(8, 8), (4, 4), (4, 8), (8, 2)])  # as on twice or a quarter of devices
def test_a_resumed_lightning_run_sees_the_batches_of_an_uninterrupted_one(data, tmp_path, before, after):
    whole = fit(data(micro_batch=after), after, tmp_path).by_step()
    checkpoint = tmp_path / "step.ckpt"
    begun = fit(data(micro_batch=before), before, tmp_path, SaveAndStop(7, checkpoint))
    resumed = fit(data(micro_batch=after), after, tmp_path, DeviceChanges(), checkpoint=checkpoint)
    assert sorted(begun.by_step()) == list(range(7))
    assert {**begun.by_step(), **resumed.by_step()} == whole
    assert sorted(whole) == list(range(20))


def test_lightning_validates_on_every_window_once(data, tmp_path):
    validated = fit(data(), 4, tmp_path).validated
    windows = [window.tolist() for batch in data().val_dataloader() for window in batch.windows_BT]
    assert list(chain.from_iterable(validated[:4])) == windows

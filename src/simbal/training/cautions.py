"""Warnings of what no curve shows: clipping by an auxiliary loss, and bf16 weights that do not move.

A bf16 number has 8 significant bits: a norm gain of 1 moves by no less than 1/256 down or 1/128 up, AdamW by about the
learning rate, and steps below half a unit in the last place round to nothing. Reference: Micikevicius et al. 2018
(arXiv 1710.03740), section 3.1.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from simbal.config.schema import OptimConfig
from simbal.distributed import is_first, sum_over_ranks
from simbal.model.moe import BIASES
from simbal.model.transformer import Transformer
from simbal.training.lit_moe import LitMoE

LEAST_CLIPPED = 0.01  # less of a gradient makes AdamW's `eps` a share of it that shows in the loss: results/bench_grid
log = logging.getLogger("simbal")
AT_FULL_RATE = 100  # steps after the warm-up
FEW = 0.01  # of the entries
ENTRIES = 4096  # of each weight that are looked at, so that the copy of them is small


def divided_gradients(clipped: Sequence[float], optim: OptimConfig) -> Iterator[str]:
    """Yield a warning where clipping has left so little of the gradients that AdamW's `eps` is not small beside them.

    The long gradient of an auxiliary loss does so, and changes the steps of weights that it has nothing to do with.

    Args:
        clipped: the factors by which the gradients of the logged steps were scaled.
        optim: the config's group of that name.
    """
    if clipped and median(clipped) < LEAST_CLIPPED:
        yield (
            f"optim.grad_clip={optim.grad_clip:g} has divided gradients by {1 / median(clipped):,.0f}, as the long one "
            f"of an auxiliary loss makes it do, and optim.eps={optim.eps:g} is no longer small beside what is left of "
            "the others: set optim.grad_clip=0"
        )


class Rounding(Callback):
    """Compares the bf16 weights with those that the process began with, once, and warns of kinds that stand still.

    That is `AT_FULL_RATE` steps after the warm-up, or after the last step. `warnings` has the sentences.
    """

    def __init__(self, warmup_steps: int, max_steps: int, lr: float) -> None:
        self.step, self.lr = min(warmup_steps + AT_FULL_RATE, max_steps), lr
        self.warnings: list[str] = []
        self._start: dict[str, Tensor] = {}
        self._begun = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the entries that are looked at."""
        assert isinstance(module, LitMoE)
        self._begun = trainer.global_step
        self._start = {name: entries.clone() for name, entries in watched(module.model).items()}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Compare when the step has come, on every rank alike; a process that begins after it waits for the last."""
        assert isinstance(module, LitMoE)
        due = self.step if self._begun < self.step else trainer.max_steps
        if not self._start or trainer.global_step < due:
            return
        steps = trainer.global_step - self._begun
        counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.int64))
        for name, entries in watched(module.model).items():
            moved = int((entries != self._start[name]).sum())
            counts[kind(name)] += torch.tensor([moved, entries.numel()])
        self._start = {}
        for of_kind, moved_and_all in counts.items():
            moved, total = sum_over_ranks(moved_and_all).tolist()
            if moved < FEW * total:
                self.warnings.append(
                    f"{moved:,} of {total:,} entries of the {of_kind} have moved in {steps} steps, as those of "
                    f"optim.lr={self.lr:g} round to nothing in bf16: use trainer.precision=bf16-mixed"
                )
        for sentence in self.warnings if is_first() else ():
            log.warning(sentence)


@torch.no_grad()
def watched(model: Transformer) -> dict[str, Tensor]:
    """Return evenly spread entries of every trained bf16 weight by its name, of this rank's part of it.

    An embedding of its own is left out: rows of tokens that have not come yet stand still in any precision.
    """
    left_out = None if model.shape.tie_embeddings else model.embedding.weight
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16 and parameter is not left_out:
            entries = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().flatten()
            found[name] = entries[:: max(1, len(entries) // ENTRIES)]
    return found


def kind(name: str) -> str:
    """Return what a weight of a Transformer is called in a sentence."""
    if name.rpartition(".")[2] in BIASES:
        return "biases"
    if "norm" in name:
        return "norm gains"
    if "router" in name:
        return "routers"
    if "attention" in name:
        return "attention"
    return "feed-forwards" if "feed_forward" in name else "head"

"""Coordinate check of muP: how much activations change in the first steps of training, by model width.

python -m benchmarks.coordinate_check [override ...]: trains models of several widths on one batch, with the standard
parametrization and with optim.mup=true. Prints the RMS change of each activation since initialization, and its slope
over the width in log-log coordinates: 0 means that the width does not matter. Depth, number of experts and number of
heads are fixed; the widths of heads and experts grow with d_model.

python -m benchmarks.coordinate_check transfer [override ...]: trains three widths at several learning rates, and prints
the validation loss.

Reference: Yang et al. 2022 (arXiv 2203.03466), appendix D.1.
Shapes: B sequences, S tokens.
"""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.composing import spec_of
from simbal.model.router import Routing
from simbal.model.transformer import Transformer
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.build import build_module
from simbal.training.run import train

WIDTHS, STEPS, BATCH_BS = (64, 128, 256, 512), 5, (8, 32)
SHAPE = (
    "data=synthetic", "data.vocab_size=16", "model.num_layers=2", "model.num_heads=2", "model.num_experts=8",
    "model.top_k=2", "model.kernels=torch", "experts=torch", "balancing=none", "optim.mup_base_width=64",
    "optim.mup_base_head_dim=32", "optim.lr=4e-3", "optim.eps=1e-10", "optim.warmup_steps=0", "optim.schedule=constant",
    "logger=none",
)  # fmt: skip
TRANSFER_WIDTHS, RATES = (64, 128, 256), (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
TRANSFER = (
    "trainer.max_steps=120", "trainer.global_batch=16", "trainer.micro_batch=16", "trainer.val_every=120",
    "trainer.val_at=none", "trainer.progress_bar=false", "trainer.ckpt_every=1000", "data.seq_len=64",
    "data.vocab_size=256", "optim.warmup_steps=12", "optim.schedule=cosine",
)  # fmt: skip


class _Store:
    """The part of a prepared data set that a model needs, without data."""

    def __init__(self, vocab_size: int) -> None:
        self.meta, self.byte_len = {"eot": 0}, torch.ones(vocab_size).numpy()


def of_width(width: int, *overrides: str) -> tuple[str, ...]:
    """Return the overrides of a model of this width."""
    return (*SHAPE, f"model.d_model={width}", f"model.d_expert={width // 2}", *overrides)


def changes(spec: RunSpec, steps: int = STEPS) -> dict[str, float]:
    """Return the RMS change of each activation after some steps on one batch of random tokens.

    Activations of all layers are pooled; `logits` are the head's.
    """
    store: Any = _Store(spec.config.data.vocab_size)
    module = build_module(spec, store, torch.device("cpu"), "32-true")
    optimizer = module.configure_optimizers()["optimizer"]
    random = torch.Generator().manual_seed(0)
    window_BT = torch.randint(spec.config.data.vocab_size, (BATCH_BS[0], BATCH_BS[1] + 1), generator=random)
    before = activations(module.model, window_BT[:, :-1])
    for _ in range(steps):
        head, _ = module(window_BT[:, :-1], window_BT[:, 1:])
        head.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = activations(module.model, window_BT[:, :-1])
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in after}


@torch.no_grad()
def activations(model: Transformer, tokens_BS: Tensor) -> dict[str, Tensor]:
    """Return the outputs of attention and feed-forwards, the routers' logits, and the head's logits."""
    found: dict[str, list[Tensor]] = {"attention": [], "feed-forward": []}
    with recorded(
        {"attention": [block.attention for block in model.blocks], "feed-forward": model.feed_forwards}, found
    ):
        hidden_BSD, routings = model(tokens_BS)
    stacked = {name: torch.stack(parts) for name, parts in found.items()}
    router = torch.stack([routing.logits_NE for routing in routings])
    return stacked | {"router logits": router, "logits": hidden_BSD @ model.head_VD.T}


@contextmanager
def recorded(modules: Mapping[str, Sequence[Any]], found: Mapping[str, list[Tensor]]) -> Iterator[None]:
    """Append every output of the modules to `found` within the block."""

    def keep(name: str, output: Tensor | tuple[Tensor, Routing]) -> None:
        found[name].append(output if isinstance(output, Tensor) else output[0])

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: keep(name, output))
        for name, parts in modules.items()
        for module in parts
        if isinstance(module, nn.Module)
    ]
    yield
    for handle in handles:
        handle.remove()


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the least-squares slope of log(value) over log(width)."""
    x, y = (torch.tensor([math.log(number) for number in numbers]) for numbers in (widths, values))
    return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


def print_check(overrides: Sequence[str]) -> None:
    """Print the changes and their slopes for both parametrizations."""
    for name, mup in (("standard", "false"), ("muP", "true")):
        columns = [changes(spec_of(*of_width(width, f"optim.mup={mup}", *overrides))) for width in WIDTHS]
        print(f"{name:16}" + "".join(f"{width:>9}" for width in WIDTHS) + f"{'slope':>9}")
        for activation in columns[0]:
            values = [column[activation] for column in columns]
            print(f"{activation:16}" + "".join(f"{value:9.4f}" for value in values) + f"{slope(WIDTHS, values):9.2f}")


def print_transfer(overrides: Sequence[str]) -> None:
    """Print the final validation loss of three widths at each learning rate."""
    with tempfile.TemporaryDirectory() as folder:
        for name, mup in (("standard", "false"), ("muP", "true")):
            print(f"{name:10}" + "".join(f"{rate:>9.4g}" for rate in RATES))
            for width in TRANSFER_WIDTHS:
                losses = []
                for rate in RATES:
                    keys = (*TRANSFER, f"optim.mup={mup}", f"optim.lr={rate}", f"output_dir={folder}")
                    spec = spec_of(*of_width(width, *keys, *overrides))
                    with redirect_stdout(sys.stderr):
                        train(spec)
                    record = RunFolder(spec.path).read_record()
                    assert record is not None, "the run has finished"
                    losses.append(record["metrics"]["val/loss"])
                print(f"{width:<10}" + "".join(f"{loss:9.4f}" for loss in losses), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["transfer"]:
        print_transfer(sys.argv[2:])
    else:
        print_check(sys.argv[1:])

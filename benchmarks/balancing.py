"""CPU time of a training step by strategy, relative to none: python -m benchmarks.balancing [override ...]

Strategies take turns within one process, so that a noisy machine slows all of them. Prints medians over the rounds.
"""

import statistics
import sys
import tempfile
import time

import torch

from benchmarks.composing import spec_of
from simbal.config.options import options
from simbal.data.prepare import prepare
from simbal.training.build import build_data, build_module
from simbal.training.module import LitMoE

ROUNDS = 9
torch.set_num_threads(1)


def module_and_batch(option: str, output_dir: str) -> tuple[LitMoE, torch.Tensor]:
    """Return a model with the strategy and the first batch of its run."""
    spec = spec_of(f"output_dir={output_dir}", f"balancing={option}", *sys.argv[1:])
    store = prepare(spec.config.data, progress=False)
    module = build_module(spec, store, torch.device("cpu"), "32-true")
    return module, next(iter(build_data(spec, store).train_dataloader()))


def seconds(module: LitMoE, optimizer: torch.optim.Optimizer, batch_BT: torch.Tensor) -> float:
    """Return the CPU time of one step: forward, backward, optimizer and strategy."""
    started = time.process_time()
    module.training_step(batch_BT, 0)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    module.finish_step(0, 1e-3)
    return time.process_time() - started


def main() -> None:
    """Print one line per option of conf/balancing."""
    with tempfile.TemporaryDirectory() as out:
        built = {option: module_and_batch(option, out) for option in options("balancing")}
        optimizers = {name: torch.optim.AdamW(part.model.parameters(), fused=True) for name, (part, _) in built.items()}
        taken: dict[str, list[float]] = {option: [] for option in built}
        for _ in range(ROUNDS):
            for option, (module, batch_BT) in built.items():
                for _ in range(2):  # the first step is slower after a strategy that uses much memory
                    spent = seconds(module, optimizers[option], batch_BT)
                taken[option].append(spent)
        for option in built:
            ratios = [spent / none for spent, none in zip(taken[option], taken["none"], strict=True)]
            print(
                f"{option:16} {1e3 * statistics.median(taken[option]):6.0f} ms  {statistics.median(ratios):.3f} x none"
            )


if __name__ == "__main__":
    main()

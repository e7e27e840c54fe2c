"""A training step on a CPU beside Hugging Face's: python benchmarks/bench_step.py [tiny|small ...] [--threads N ...]

Every arm is a model of the same widths with its own AdamW (fused) and the clipping of its gradient, on the same random
tokens. They take turns in one process, so that a noisy machine slows all of them; medians of a round's ratios are
shown, of process CPU time (for one thread the honest one where others use the cores) and of wall time.

simbal    the bare step: forward, loss, backward, clipping, AdamW, schedule, balancing
trainer   the same through Lightning's Trainer with the callbacks of train.py; no checkpoint or validation falls in it
mixtral   MixtralForCausalLM as transformers starts it; attention sdpa, no cache, no auxiliary loss (ours has one, and
          a z-loss); `eager`: the loop over experts; `aux`: with its auxiliary loss
llama     LlamaForCausalLM whose feed-forward is as wide as the K chosen experts together

With --profile, where the time of our step goes.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import transformers
from hydra import compose, initialize_config_dir
from step_profile import profile
from step_table import report
from torch import Tensor

from simbal.analysis.training_cost import parameters
from simbal.data.store import Store
from simbal.run_spec import RunSpec
from simbal.training.build import build_module
from simbal.training.lit_moe import LitMoE
from simbal.training.pes import PES
from simbal.training.run import build_trainer
from simbal.training.telemetry import Telemetry

Step = Callable[[], None]
CONF = Path(__file__).parents[1] / "conf"
VOCABULARY = {"tiny": 4096, "small": 8192}
BATCHES = 4  # different ones, in turn


def our_spec(model: str, out: str) -> RunSpec:
    """What `python train.py model=<model>` composes, but for the vocabulary and for files."""
    fixed = ("logger=none", "trainer.progress_bar=false", "trainer.accelerator=cpu", "trainer.max_steps=1000000")
    never = ("trainer.ckpt_every=1000000", "trainer.val_every=1000000")
    overrides = [f"model={model}", f"data.vocab_size={VOCABULARY[model]}", f"output_dir={out}", *fixed, *never]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", overrides, return_hydra_config=True))


def our_module(spec: RunSpec) -> LitMoE:
    """The module of a run, without its text."""
    store = SimpleNamespace(meta={"eot": 0}, byte_len=np.ones(spec.config["data"]["vocab_size"], np.int32))
    return build_module(spec, cast(Store, store), torch.device("cpu"), "32-true").train()


class Random:
    """The same random (B, S + 1) windows for every arm, in turn."""

    def __init__(self, spec: RunSpec) -> None:
        data, trainer = spec.config["data"], spec.config["trainer"]
        shape = (BATCHES, trainer["global_batch"], data["seq_len"] + 1)
        self.windows = torch.randint(data["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
        self.tokens_per_step = trainer["global_batch"] * data["seq_len"]
        self._taken = 0

    def next(self) -> Tensor:
        """The next one."""
        self._taken += 1
        return self.windows[self._taken % BATCHES]


def bare(spec: RunSpec, data: Random) -> Step:
    """Our step without Lightning's loop."""
    module = our_module(spec)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]

    def step() -> None:
        module.training_step(data.next(), 0)["loss"].backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        module.finish_step(0, 1e-3)

    return step


def hugging_face(spec: RunSpec, data: Random, kind: str, **extra: Any) -> Step:
    """A transformers model of our shape, trained with our optimizer's numbers."""
    m, optim, causal = spec.config["model"], spec.config["optim"], transformers.AutoModelForCausalLM
    widths = {
        "vocab_size": spec.config["data"]["vocab_size"], "hidden_size": m["d_model"],
        "num_hidden_layers": m["num_layers"], "num_attention_heads": m["num_heads"],
        "num_key_value_heads": m["num_heads"], "rms_norm_eps": m["norm_eps"], "tie_word_embeddings": False,
        "use_cache": False, "max_position_embeddings": spec.config["data"]["seq_len"],
    }  # fmt: skip
    if kind == "llama":
        config: Any = transformers.LlamaConfig(**widths, intermediate_size=m["top_k"] * m["d_expert"])
    else:
        experts = {"num_local_experts": m["num_experts"], "num_experts_per_tok": m["top_k"]}
        config = transformers.MixtralConfig(
            **widths, **experts, intermediate_size=m["d_expert"], sliding_window=None,
            output_router_logits=kind == "aux",
        )  # fmt: skip
    model = causal.from_config(config, attn_implementation="sdpa", **extra).float().train()
    if kind != "llama":
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in our_module(spec).parameters())
    numbers = {"lr": optim["lr"], "betas": tuple(optim["betas"]), "weight_decay": optim["weight_decay"]}
    optimizer = torch.optim.AdamW(model.parameters(), **numbers, fused=True)

    def step() -> None:
        tokens_BS = data.next()[:, :-1]
        model(input_ids=tokens_BS, labels=tokens_BS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()

    return step


ARMS: dict[str, Callable[[RunSpec, Random], Step]] = {
    "simbal": bare,
    "mixtral": lambda spec, data: hugging_face(spec, data, "mixtral"),
    "mixtral eager": lambda spec, data: hugging_face(spec, data, "mixtral", experts_implementation="eager"),
    "mixtral aux": lambda spec, data: hugging_face(spec, data, "aux"),
    "llama": lambda spec, data: hugging_face(spec, data, "llama"),
}


class Rounds:
    """The training batches of a Trainer: before it gives one out, every other arm makes a step.

    From one `yield` to the next is all that the Trainer does in a step, so that its arm needs no thread.
    """

    def __init__(self, arms: dict[str, Step], data: Random, rounds: int) -> None:
        self.arms, self.data, self.rounds = arms, data, rounds
        self.taken: dict[str, list[tuple[float, float]]] = {name: [] for name in [*arms, "trainer"]}

    def __len__(self) -> int:  # without it, Lightning fetches one ahead
        return self.rounds

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.rounds):
            for name, step in self.arms.items():
                started = clocks()
                step()
                self._took(name, started)
            batch_BT, started = self.data.next(), clocks()
            yield batch_BT
            self._took("trainer", started)

    def _took(self, name: str, started: tuple[float, float]) -> None:
        cpu, wall = clocks()
        self.taken[name].append((cpu - started[0], wall - started[1]))


def clocks() -> tuple[float, float]:
    """Process CPU time and wall time."""
    return time.process_time(), time.perf_counter()


def measure(spec: RunSpec, rounds: int, out: str) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of each round of each arm, less two rounds that only warm up and Lightning's last."""
    data = Random(spec)
    turns = Rounds({name: build(spec, data) for name, build in ARMS.items()}, data, rounds + 3)
    trainer_keys = spec.config["trainer"]
    telemetry = Telemetry(Path(out), trainer_keys["log_every"], 10**6, data.tokens_per_step, PES(0, 0))
    trainer = build_trainer(spec, Path(out), telemetry, "cpu", "32-true")
    trainer.fit_loop.epoch_loop.max_steps = rounds + 3
    trainer.fit(our_module(spec), train_dataloaders=turns)
    return {name: taken[2 : 2 + rounds] for name, taken in turns.taken.items()}


def main() -> None:
    """Measure the shapes, with each number of threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*VOCABULARY])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    sys.path.append(sys.path.pop(0))  # benchmarks/tabulate.py is not the package that torch looks for at exit
    for model in options.models:
        for threads in dict.fromkeys(options.threads):
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory() as out:
                spec = our_spec(model, out)
                print(f"\n{model}, {threads} thread{'s' if threads > 1 else ''}")
                tokens, counted = Random(spec).tokens_per_step, parameters(our_module(spec).model.shape)
                flops = counted.training_flops(spec.config["data"]["seq_len"], tokens)
                report(measure(spec, options.rounds, out), flops, tokens)
                if options.profile:
                    profile(bare(spec, Random(spec)))


if __name__ == "__main__":
    main()

"""CPU training step, compared with Hugging Face: python -m benchmarks.bench_step [MODEL ...] [--threads N ...]

All arms have the same widths, their own fused AdamW and the same random tokens. Each arm runs in its own process, which
reuses memory and has huge pages, as in train.py. Arms take turns of several steps, so that a noisy machine slows all of
them. Medians of the ratios to the first arm are printed, for the process's CPU time (with one thread the fair measure
on a shared machine) and for wall time.

torch        our step with the kernels of PyTorch: forward, loss, backward, clipping, AdamW, schedule, balancing
native       the same with `experts=native model.kernels=native`
trainer      native, through Lightning's Trainer with the callbacks of train.py, without checkpoints and validation
mixtral      MixtralForCausalLM with the defaults of transformers: attention sdpa, no cache, no auxiliary loss (ours has
             one, and a z-loss)
mixtral aux  the same with its auxiliary loss
llama        LlamaForCausalLM with a feed-forward layer as wide as K experts together
default      mixtral with the memory settings of glibc and torch

--arms chooses arms, --profile prints the time of each part of the native step.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.composing import spec_of
from benchmarks.step_profile import profile
from benchmarks.step_table import cpu_model, report
from benchmarks.step_turns import take_turns
from simbal.cost import parameters
from simbal.data.store import Store
from simbal.native.library import vector_width
from simbal.processes import tune_memory_allocation
from simbal.runs.spec import RunSpec
from simbal.training.build import build_module
from simbal.training.callbacks import build_callbacks
from simbal.training.module import LitMoE
from simbal.training.run import build_trainer

VOCABULARY = {"tiny": 4096, "bench": 4096, "small": 8192}
BATCHES, WARM_UP = 4, 3  # number of different batches; warm-up rounds


def our_spec(model: str, out: str, kernels: str) -> RunSpec:
    """Return the run of `python train.py model=<model>`, apart from the vocabulary and files."""
    fixed = ("logger=none", "trainer.progress_bar=false", "trainer.accelerator=cpu", "trainer.max_steps=1000000")
    never = ("trainer.ckpt_every=1000000", "trainer.val_every=1000000")
    chosen = (f"model={model}", f"data.vocab_size={VOCABULARY[model]}", f"output_dir={out}")
    return spec_of(*chosen, f"experts={kernels}", f"model.kernels={kernels}", *fixed, *never)


def our_module(spec: RunSpec) -> LitMoE:
    """Return the module of a run, without data."""
    store = SimpleNamespace(meta={"eot": 0}, byte_len=np.ones(spec.config.data.vocab_size, np.int32))
    return build_module(spec, cast(Store, store), torch.device("cpu"), "32-true").train()


def random_batches(spec: RunSpec) -> Tensor:
    """Return token ids, (BATCHES, B, S + 1), equal for all arms."""
    data, trainer = spec.config.data, spec.config.trainer
    shape = (BATCHES, trainer.global_batch, data.seq_len + 1)
    return torch.randint(data.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def bare(spec: RunSpec, batches: Iterable[Tensor]) -> None:
    """Run our step without Lightning's loop."""
    tune_memory_allocation()
    module = our_module(spec)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for batch_BT in batches:
        module.training_step(batch_BT, 0)["loss"].backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        module.finish_step(0, 1e-3)


def trained(spec: RunSpec, batches: Iterable[Tensor]) -> None:
    """Run our step with the Trainer of `train.py`."""
    tune_memory_allocation()
    spec.path.mkdir(parents=True)
    trainer = build_trainer(spec, build_callbacks(spec), "cpu", "32-true")
    trainer.fit_loop.max_epochs = 1  # `batches` is one long epoch
    module = our_module(spec)
    trainer.fit(module, train_dataloaders=batches)


def hugging_face(spec: RunSpec, batches: Iterable[Tensor], kind: str, kept: bool = True) -> None:
    """Train a transformers model of the same shape with the same optimizer settings."""
    if kept:
        tune_memory_allocation()
    m, optim, causal = spec.config.model, spec.config.optim, transformers.AutoModelForCausalLM
    widths = {
        "vocab_size": spec.config.data.vocab_size, "hidden_size": m.d_model,
        "num_hidden_layers": m.num_layers, "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_heads, "rms_norm_eps": m.norm_eps, "tie_word_embeddings": bool(m.tie_embeddings),
        "use_cache": False, "max_position_embeddings": spec.config.data.seq_len,
    }  # fmt: skip
    if kind == "llama":
        config: Any = transformers.AutoConfig.for_model("llama", **widths, intermediate_size=m.top_k * m.d_expert)
    else:
        experts = {"num_local_experts": m.num_experts, "num_experts_per_tok": m.top_k}
        config = transformers.AutoConfig.for_model(
            "mixtral", **widths, **experts, intermediate_size=m.d_expert, sliding_window=None,
            output_router_logits=kind == "aux",
        )  # fmt: skip
    model = causal.from_config(config, attn_implementation="sdpa").float().train()
    if kind != "llama":
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in our_module(spec).parameters())
    numbers: dict[str, Any] = {"lr": optim.lr, "eps": optim.eps, "weight_decay": optim.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **numbers, betas=(optim.betas[0], optim.betas[1]), fused=True)

    for batch_BT in batches:
        tokens_BS = batch_BT[:, :-1]
        model(input_ids=tokens_BS, labels=tokens_BS).loss.backward()
        if optim.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()


ARMS: dict[str, tuple[str, Callable[[RunSpec, Iterable[Tensor]], None]]] = {
    "torch": ("torch", bare),
    "native": ("native", bare),
    "trainer": ("native", trained),
    "mixtral": ("torch", partial(hugging_face, kind="mixtral")),
    "mixtral aux": ("torch", partial(hugging_face, kind="aux")),
    "llama": ("torch", partial(hugging_face, kind="llama")),
    "default": ("torch", partial(hugging_face, kind="mixtral", kept=False)),
}


def main() -> None:
    """Measure the shapes with each number of threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*VOCABULARY])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(f"{cpu_model()}, vectors of {32 * vector_width()} bits")
    for model in options.models:
        for threads in dict.fromkeys(options.threads):
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory() as out:
                specs = {kernels: our_spec(model, out, kernels) for kernels in ("torch", "native")}
                spec = specs["native"]
                batches = random_batches(spec)
                tokens = batches[0, :, :-1].numel()
                flops = parameters(our_module(spec).model.shape).training_flops(spec.config.data.seq_len, tokens)
                print(f"\n{model}, {threads} thread{'s' if threads > 1 else ''}")
                arms = {name: partial(ARMS[name][1], specs[ARMS[name][0]]) for name in options.arms}
                report(take_turns(arms, batches, threads, options.rounds, WARM_UP), flops, tokens)
                if options.profile:
                    profile(partial(bare, spec), batches)


if __name__ == "__main__":
    main()

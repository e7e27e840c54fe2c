"""Short runs whose curves must not change, and how to record them: `python -m tests.pinned.runs`.

Every model and optimizer key is set here, so that changes of presets have no effect.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

import simbal

CURVES = Path(__file__).with_name("curves.json")

COMMON = (
    "model=tiny", "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.num_kv_heads=null",
    "model.head_dim=null", "model.qk_norm=none", "model.d_expert=16", "model.num_experts=8", "model.top_k=2",
    "model.num_shared_experts=0", "model.rope_theta=10000.0", "model.norm_eps=1.0e-5", "model.init_std=0.02",
    "model.tie_embeddings=false", "model.bias=false", "model.token_table=false",
    "model.kernels=torch", "experts=torch",
    "optim=adamw", "optim.lr=1.0e-2", "optim.weight_decay=0.01", "optim.betas=[0.9,0.95]",
    "optim.eps=1.0e-5", "optim.decay_router=true", "optim.warmup_steps=10", "optim.z_loss_coef=1.0e-5",
    "optim.grad_clip=1", "optim.aux_layer_reduce=sum",
    "data=synthetic", "data.vocab_size=128", "data.seq_len=32", "data.documents=64", "data.document_tokens=256",
    "data.validation_tokens=512", "data.branching=4",
    "trainer.max_steps=60", "trainer.global_batch=8", "trainer.micro_batch=4", "trainer.precision=32-true",
    "trainer.accelerator=cpu", "trainer.log_every=1", "trainer.val_every=60", "trainer.val_at=none",
    "trainer.ckpt_every=60", "trainer.progress_bar=false", "logger=none", "seed=3",
)  # fmt: skip

RUNS = {
    "none": ["balancing=none"],
    "lbl": ["balancing=lbl"],
    "lbl_sequence": ["balancing=lbl_sequence"],
    "simbal": ["balancing=simbal"],
    "lf": ["balancing=lf"],
    "lf_lbl, sigmoid": ["balancing=lf_lbl", "router=sigmoid"],
    "hash": ["balancing=hash"],
    "top_p": ["balancing=top_p"],
    "remoe": ["balancing=remoe", "router=relu"],
    "expert_choice": ["balancing=expert_choice"],
    "quantile": ["balancing=quantile"],
    "deepseek_v3": ["balancing=deepseek_v3", "router=sigmoid"],
    "ortho_param": ["balancing=ortho_param"],
    "dense": ["balancing=none", "model.num_experts=0"],
}


def processor() -> str:
    """Return the kind of processor: rounding, and so every bit, follows from it."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line
    )
    named = {key.strip(): value.strip() for key, value in fields.items()}
    kind = " ".join(named.get(key, "?") for key in ("vendor_id", "cpu family", "model"))
    return f"{platform.machine()} {kind} {torch.backends.cpu.get_cpu_capability()}"


def curves(name: str, folder: Path) -> dict[str, list[float]]:
    """Train a run in `folder`; return the curves of its losses, MaxVio and gradient norm, a value for each step."""
    torch.set_num_threads(1)
    run = simbal.train([*COMMON, *RUNS[name], f"output_dir={folder}", f"data.cache_dir={folder / 'data'}"])
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/ce" in row]
    keys = [key for key in steps[0] if key in SCALARS or key.startswith("train/aux/")]
    return {key: [row[key] for row in steps] for key in keys}


SCALARS = ("train/ce", "train/max_vio", "train/grad_norm")


def record() -> None:
    """Add the curves of this kind of processor to those that are kept."""
    kept = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        kept[processor()] = {name: curves(name, Path(folder)) for name in RUNS}
    lines = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in runs.items())
        + "\n}"
        for kind, runs in kept.items()
    ]
    CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(record())

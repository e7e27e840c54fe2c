"""What every config that is accepted must satisfy, said a second time and in other words than the checks say it."""

import math
from pathlib import Path
from typing import Any

from simbal.runs.spec import RunSpec

COUNTS = {
    "model": ("num_layers", "d_model", "num_heads", "d_expert"),
    "data": ("seq_len", "vocab_size"),
    "trainer": ("max_steps", "global_batch", "micro_batch", "val_every", "log_every", "ckpt_every"),
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return [leaf for one in inner for leaf in leaves(one)]
    return [value]


def require_sense(spec: RunSpec) -> None:
    """Types, ranges, and a folder that is nowhere but in outputs/<name>."""
    config, model, optim, trainer = spec.written, *(spec.written[k] for k in ("model", "optim", "trainer"))
    assert all(type(leaf) in (str, int, float, bool, type(None)) for leaf in leaves(config))
    assert all(math.isfinite(leaf) for leaf in leaves(config) if isinstance(leaf, float))
    assert all(abs(leaf) <= 2**53 for leaf in leaves(config) if isinstance(leaf, int))
    assert not any("\0" in leaf for leaf in leaves(config) if isinstance(leaf, str))
    for group, keys in COUNTS.items():
        assert all(type(config[group][key]) is int and config[group][key] >= 1 for key in keys)
    assert type(config["seed"]) is int
    assert config["seed"] >= 0
    assert 0 <= optim["lr"] < math.inf
    assert len(optim["betas"]) == 2
    assert all(0 <= beta < 1 for beta in optim["betas"])
    assert model["init_std"] > 0 < model["rope_theta"]
    assert model["num_experts"] == 0 or 1 <= model["top_k"] <= model["num_experts"]
    width = model["head_dim"] or model["d_model"] / model["num_heads"]
    assert width > 0 == width % 2
    assert model["num_kv_heads"] is None or model["num_heads"] % model["num_kv_heads"] == 0 < model["num_kv_heads"]
    assert trainer["global_batch"] % trainer["micro_batch"] == 0
    assert all(type(trainer[key]) is bool for key in ("progress_bar", "force_precision"))
    assert trainer["precision"] in ("auto", "32-true", "bf16-mixed", "bf16-true")
    assert config["balancing"]
    assert all(keys.get("coef", 0) >= 0 for keys in config["balancing"].values())
    assert type(config["name"]) is str
    require_inside(spec)


def require_inside(spec: RunSpec) -> None:
    """The run's folder is a folder of a folder of output_dir, whatever links and dots are made of."""
    outputs = Path(spec.config.output_dir)
    assert spec.path.parent.parent == outputs
    assert len(spec.path.resolve().relative_to(outputs.resolve()).parts) == 2
    assert ".." not in spec.path.relative_to(outputs).parts

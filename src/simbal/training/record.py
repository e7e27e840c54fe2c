"""The entries of record.json that trace a number in a table to its code, data and definition."""

import importlib.metadata
import logging
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from simbal import __name__ as package
from simbal.cost import count_parameters
from simbal.data.loader import TokenData
from simbal.data.ngrams import ngram_losses
from simbal.metrics.definitions import SETTLING, SIMILARITY, SPEED, VALIDATION, definitions
from simbal.runs.record import now
from simbal.runs.spec import RunSpec
from simbal.training.build import choose_backend, choose_kernels, resolve_router_init
from simbal.training.module import LitMoE

log = logging.getLogger("simbal")
LIBRARIES = ("torch", "lightning", "hydra-core", "omegaconf", "tiktoken", "numpy")


def describe_run(
    spec: RunSpec, data: TokenData, module: LitMoE, device: torch.device, precision: str
) -> dict[str, Any]:
    """Return the entries of record.json that are known before the first step."""
    trainer, store, is_moe = spec.config.trainer, data.store, bool(module.model.routers)
    metrics = [*VALIDATION, SPEED]
    if is_moe:
        metrics += [*SETTLING, *(SIMILARITY if trainer.pes_every else ())]
    choice = choose_backend(spec, device, precision)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "config_hash": spec.hash,
        "choices": spec.choices,
        "seed": spec.config.seed,
        "data": {
            **store.fingerprints,
            **{key: store.meta[key] for key in ("source", "tokenizer_sha256", "versions")},
            "ngrams": ngram_losses(data, module.model.shape.vocab_size),
        },
        "definitions": definitions(metrics),
        "objective": describe_objective(module),
        "code": code_version(),
        "versions": {"python": platform.python_version(), **versions},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "backend": module.model.backend,
        "backend_choice": choice.described if choice else None,
        "kernels": module.model.kernels,
        "kernels_choice": choose_kernels(spec, device, precision).described,
        "router_init": describe_router_init(spec, module) if is_moe else None,
        "precision": precision,
        "parameters": count_parameters(module.model),
        "steps": trainer.max_steps,
        "tokens": trainer.max_steps * trainer.global_batch * spec.config.data.seq_len,
        "epochs": trainer.max_steps / data.steps_per_epoch,
        "started": now(),
    }


def describe_router_init(spec: RunSpec, module: LitMoE) -> str:
    """Return the routers' initialization, or one per layer if they differ."""
    kinds = resolve_router_init(spec.config.router.init, module.balancing, module.model.shape.num_layers)
    return ", ".join(kinds if len({*kinds}) > 1 else kinds[:1])


def describe_objective(module: LitMoE) -> dict[str, dict[str, Any]]:
    """Return each strategy's formula, source and declared properties.

    The coefficient is included if the strategy has a loss, and the layers if it does not act in all.
    """
    shape, balancing = module.model.shape, module.balancing
    objective: dict[str, dict[str, Any]] = {}
    for name, part in balancing.parts.items():
        objective[name] = {"formula": part.formula, "citation": part.citation, "properties": asdict(part.properties)}
        if name in balancing.layers:
            objective[name]["layers"] = [*balancing.layers[name]]
        if part.properties.differentiable:
            reduction, num_layers = (
                balancing.layer_reduction(name),
                len(balancing.layers.get(name, module.model.routers)),
            )
            objective[name] |= {
                "coef": part.coef,
                "schedule": balancing.schedule(name).points,
                "over_layers": reduction,
                "effective_coef": part.effective_coef(num_layers if reduction == "sum" else 1, shape.top_k),
                "unit": part.unit,
            }
    return objective


def print_header(spec: RunSpec, run: dict[str, Any]) -> None:
    """Print and log strategies, expert backend and kernels, and notes on slow precision and short runs."""
    lines = []
    for name, part in run["objective"].items():
        layers = f" in layers {', '.join(map(str, part['layers']))}" if "layers" in part else ""
        lines.append(f"{name}{layers}: {part['formula']}")
        if "coef" in part:
            points = ", ".join(f"{factor:g} at step {step}" for step, factor in part["schedule"])
            schedule = f" times {points}" if len(part["schedule"]) > 1 else ""
            lines.append(
                f"  coef {part['coef']:g}{schedule}, {part['over_layers']} over layers: "
                f"effective coefficient {part['effective_coef']:g} of {part['unit']}"
            )
    if choice := run["backend_choice"]:
        lines.append(f"experts: {choice['reason']}")
    lines.append(f"attention and head: {run['kernels_choice']['reason']}")
    if run["precision"] != "32-true" and run["device"].endswith(" CPU"):
        lines.append(f"note: on a CPU, trainer.precision={run['precision']} is 1.3 to 1.9 times slower than 32-true")
    warmup_steps, max_steps = spec.config.optim.warmup_steps, spec.config.trainer.max_steps
    if warmup_steps >= max_steps:
        lines.append(
            f"note: trainer.max_steps={max_steps} is not longer than warm-up (optim.warmup_steps={warmup_steps}): the "
            "peak learning rate is never reached"
        )
    if spec.config.top1_weight_is_one:
        lines.append(
            "note: a token with one expert gives it weight 1 (model.top_k=1, router.renormalize=true), so the "
            "language-model loss gives the router no gradient there"
        )
    for line in lines:
        print(line)
        log.info("%s", line)


def code_version() -> dict[str, str | bool | None]:
    """Return the package's version, and the commit of a git checkout; `dirty` means uncommitted changes.

    Changes in results/ do not count: `make study` writes there.
    """
    version = importlib.metadata.version(package)

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.check_output(command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL)

    try:
        # an installed package may be inside an unrelated repository
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ":/", ":(top,exclude)results")
    except (OSError, subprocess.CalledProcessError):
        return {"version": version, "commit": None, "dirty": None}
    return {"version": version, "commit": commit.strip(), "dirty": bool(changes.strip())}

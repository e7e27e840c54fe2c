"""The content of a run's record.json: enough to trace a number of a table to code, data and definition."""

import importlib.metadata
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from simbal import __name__ as package
from simbal.cost import count_parameters
from simbal.data.loader import TokenData
from simbal.metrics.definitions import SETTLING, SIMILARITY, SPEED, VALIDATION, definitions
from simbal.runs.record import now
from simbal.runs.spec import RunSpec
from simbal.training.build import choose_backend, resolve_router_init
from simbal.training.module import LitMoE

LIBRARIES = ("torch", "lightning", "hydra-core", "omegaconf", "tiktoken", "numpy")


def describe(spec: RunSpec, data: TokenData, module: LitMoE, device: torch.device, precision: str) -> dict[str, Any]:
    """Return the entries of record.json that are known before the first step."""
    trainer, store, routed = spec.config.trainer, data.store, bool(module.model.routers)
    choice = choose_backend(spec, device, precision)
    return {
        "config_hash": spec.hash,
        "choices": spec.choices,
        "seed": spec.config.seed,
        "data": {
            **store.fingerprints,
            **{key: store.meta[key] for key in ("source", "tokenizer_sha256", "versions")},
        },
        "definitions": definitions(
            [
                *VALIDATION,
                SPEED,
                *(SETTLING if routed else ()),
                *(SIMILARITY if trainer.pes_every and routed else ()),
            ]
        ),
        "objective": objective(module),
        "code": code_version(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in LIBRARIES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "backend": module.model.backend,
        "backend_choice": choice.described if choice else None,
        "router_init": resolve_router_init(spec.config.router.init, module.balancing) if routed else None,
        "precision": precision,
        "parameters": count_parameters(module.model),
        "steps": trainer.max_steps,
        "tokens": trainer.max_steps * trainer.global_batch * spec.config.data.seq_len,
        "epochs": trainer.max_steps / data.steps_per_epoch,
        "started": now(),
    }


def objective(module: LitMoE) -> dict[str, dict[str, Any]]:
    """Return each strategy's formula, source and declared properties by its name, and how its loss is counted.

    A strategy without a loss has only the first three.
    """
    shape, balancing = module.model.shape, module.balancing
    described: dict[str, dict[str, Any]] = {}
    for name, part in balancing.parts.items():
        described[name] = {"formula": part.formula, "citation": part.citation, "properties": asdict(part.properties)}
        if part.properties.differentiable:
            reduction = balancing.layer_reduction(name)
            described[name] |= {
                "coef": part.coef,
                "schedule": balancing.schedule(name).points,
                "over_layers": reduction,
                "effective_coef": part.effective_coef(shape.num_layers if reduction == "sum" else 1, shape.top_k),
                "unit": part.unit,
            }
    return described


def lines(run: dict[str, Any]) -> list[str]:
    """Return the entries `objective` and `backend_choice` of a record as lines for people."""
    shown = []
    for name, part in run["objective"].items():
        shown.append(f"{name}: {part['formula']}")
        if "coef" in part:
            course = ", ".join(f"{factor:g} at step {step}" for step, factor in part["schedule"])
            times = f" times {course}" if len(part["schedule"]) > 1 else ""
            shown.append(
                f"  coef {part['coef']:g}{times}, {part['over_layers']} over layers: "
                f"effective coefficient {part['effective_coef']:g} of {part['unit']}"
            )
    choice = run["backend_choice"]
    return [*shown, f"experts: {choice['reason']}"] if choice else shown


def code_version() -> dict[str, str | bool | None]:
    """Return the package's version, and the commit of a git checkout.

    `dirty`: with uncommitted changes, except in results/, which `make study` writes.
    """
    version = importlib.metadata.version(package)
    folder = Path(__file__).parent
    try:  # the folder may lie in a checkout of something else, as that of an installed package does
        tracked = ["git", "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.check_output(tracked, cwd=folder, stderr=subprocess.DEVNULL)
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True, stderr=subprocess.DEVNULL)
        changed = ["git", "status", "--porcelain", "--", ":/", ":(top,exclude)results"]
        changes = subprocess.check_output(changed, cwd=folder, text=True)
    except (OSError, subprocess.CalledProcessError):
        return {"version": version, "commit": None, "dirty": None}
    return {"version": version, "commit": commit.strip(), "dirty": bool(changes.strip())}

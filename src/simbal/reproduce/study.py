"""What a scale asks for: sweeps with their analyses and the columns of their tables, and analyses of no run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simbal.errors import UserError

KEYS = {"command", "analyses", "columns", "needs"}


@dataclass(frozen=True)
class Study:
    """One sweep and what is made of it."""

    name: str
    overrides: list[str]  # of train.py -m
    analyses: list[str]  # of every finished run
    columns: list[str] | None  # of its table; None: what the runs' own configs name
    folder: Path  # of the runs


def studies(config: dict[str, Any]) -> list[Study]:
    """Those of `config["scale"]` that are asked for and can be done.

    Raises:
        UserError: `only` names none of them, or one has a key that is not known.
    """
    scale, only = config["scale"], config["only"]
    known = [*scale["studies"], *scale["analyses"]]
    unknown = [name for name in only or [] if name not in known]
    if unknown:
        raise UserError(f"only={unknown[0]} is no study of scale={scale['name']}: there are {', '.join(known)}")
    return [
        _study(name, keys, config)
        for name, keys in scale["studies"].items()
        if (only is None or name in only) and missing(keys, config) is None
    ]


def analyses(config: dict[str, Any]) -> dict[str, list[str]]:
    """By name, the overrides of evaluate.py for those that need no run."""
    only = config["only"]
    return {name: keys for name, keys in config["scale"]["analyses"].items() if only is None or name in only}


def missing(keys: dict[str, Any], config: dict[str, Any]) -> str | None:
    """The key of the command line that a study needs and that has no value."""
    needed = keys.get("needs")
    return needed if needed and config[needed] is None else None


def _study(name: str, keys: dict[str, Any], config: dict[str, Any]) -> Study:
    if more := keys.keys() - KEYS:
        raise UserError(f"scale.studies.{name} has a key {min(more)}: there are {', '.join(sorted(KEYS))}")
    scale = config["scale"]
    run_name = f"{scale['name']}-{name}"
    places = [f"name={run_name}", f"output_dir={config['output_dir']}"]
    overrides = [*scale["common"], *keys["command"], *places]
    folder = Path(config["output_dir"], run_name)
    return Study(name, overrides, keys.get("analyses", []), keys.get("columns"), folder)

"""Plans of the configured models, and how they look."""

from pathlib import Path

import yaml
from rich.console import Console

from simbal.analysis.plan import plan
from tests.conftest import CONF

ROOT = Path(__file__).parents[2]
KEYS = {key: value for key, value in yaml.safe_load((CONF / "analysis" / "plan.yaml").read_text())["plan"].items()
        if key != "_target_"}  # fmt: skip


def keys_of(group: str, option: str) -> dict:
    return yaml.safe_load((CONF / group / f"{option}.yaml").read_text())


def planned(model="moe_m", hardware="h200", gpus=8, **changes):
    of_model, of_hardware = keys_of("model", model), keys_of("hardware", hardware)
    of_hardware |= {key: changes.pop(key) for key in [*changes] if key in of_hardware}
    of_model |= {key: changes.pop(key) for key in [*changes] if key in of_model}
    return plan(of_model, of_hardware, gpus, **KEYS | changes)


def metrics(*arguments, **changes):
    return planned(*arguments, **changes).record["metrics"]


def shown(finding) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        finding.show(console)
    return capture.get()

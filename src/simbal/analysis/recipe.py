"""How a planned model is trained: as the paper's configs do it, as train.py does by default, or as the user says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from simbal.analysis.paper_models import VOCABULARY
from simbal.checks import one_of, whole_number
from simbal.config import ModelConfig
from simbal.config_values import check_kinds
from simbal.errors import UserError
from simbal.model.memory_cost import PRECISIONS
from simbal.model.transformer import TransformerShape

CONF = Path(__file__).parents[3] / "conf"
PAPER_TRAINERS = {(8, 768): "paper_m", (12, 1536): "paper_l"}  # by layers and width: with other experts too
PAPER_SEQ_LEN = 2048
COUNTS = ("num_layers", "d_model", "num_heads", "d_expert")


@dataclass(frozen=True)
class Recipe:
    """One training run, less its hardware."""

    model: str | None  # a file of conf/model; None: changed by the user
    shape: TransformerShape
    trainer: str  # a file of conf/trainer
    changed: tuple[str, ...]  # what the user has set instead
    steps: int
    global_batch: int  # sequences
    micro_batch: int  # sequences
    precision: str
    seq_len: int

    @property
    def tokens(self) -> int:
        """Of the whole training."""
        return self.steps * self.global_batch * self.seq_len

    @property
    def source(self) -> str:
        """Where its numbers are from."""
        return f"trainer={self.trainer}" + (f", but {', '.join(self.changed)}" if self.changed else "")


def recipe_of(model: Any, accelerator: str, settings: dict[str, Any]) -> Recipe:
    """The recipe of a model with these keys of conf/model.

    Args:
        model: the keys of `model=NAME`; None if no name was given.
        accelerator: cpu or cuda; decides the precision where a config leaves it to the device, as training does.
        settings: steps, global_batch, micro_batch, precision, seq_len and vocab_size; None: as the configs have it.

    Raises:
        UserError: a key has no sensible value, or there is no model.
    """
    name = _checked_name(model)
    trainer = PAPER_TRAINERS.get((model["num_layers"], model["d_model"]), "default")
    keys, data = _read("trainer", trainer), _read("data", "pysource")
    automatic = "32-true" if accelerator == "cpu" else "bf16-mixed"
    usual = {
        "steps": keys["max_steps"],
        "global_batch": keys["global_batch"],
        "micro_batch": keys["micro_batch"],
        "precision": automatic if keys["precision"] == "auto" else keys["precision"],
        "seq_len": data["seq_len"] if trainer == "default" else PAPER_SEQ_LEN,
        "vocab_size": data["vocab_size"] if trainer == "default" else VOCABULARY,
    }
    changed = {key: value for key, value in settings.items() if value is not None}
    for key, value in changed.items():
        if key == "precision":
            one_of("analysis.plan.precision", value, PRECISIONS)
        else:
            whole_number(f"analysis.plan.{key}", value, 1)
    chosen = usual | changed
    numbers = {key: value for key, value in model.items() if key != "init_std"}
    shape = TransformerShape(vocab_size=chosen.pop("vocab_size"), gating="softmax", renormalize=True, **numbers)
    return Recipe(name, shape, trainer, tuple(f"{key}={value}" for key, value in changed.items()), **chosen)


def _checked_name(model: Any) -> str | None:
    """The file of conf/model that has these keys, which are checked; None if the user has changed them."""
    files = sorted((CONF / "model").glob("*.yaml"))
    if model is None:
        raise UserError(f"analysis=plan needs model=NAME: there is {', '.join(file.stem for file in files)}")
    check_kinds(model, ModelConfig, "model.")
    for key in COUNTS:
        whole_number(f"model.{key}", model[key], 1)
    if model["d_model"] % (2 * model["num_heads"]):
        raise UserError(f"model.d_model={model['d_model']} must be a multiple of twice model.num_heads")
    if model["num_experts"] and not 1 <= model["top_k"] <= model["num_experts"]:
        raise UserError(f"model.top_k={model['top_k']} must lie between 1 and model.num_experts={model['num_experts']}")
    same = (file.stem for file in files if _read("model", file.stem) == model)
    return next(same, None)


def _read(group: str, option: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    return content

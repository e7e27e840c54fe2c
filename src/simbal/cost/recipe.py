"""The training recipe of a planned model: the paper's configs, train.py's defaults, or the user's settings.

The numbers that the paper prints for its models are here too.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from simbal.config.compose import typed
from simbal.config.options import option_keys, options
from simbal.config.schema import ModelConfig
from simbal.config.values import whole_number
from simbal.errors import UserError
from simbal.model.transformer import TransformerShape

# by layers and width: with other experts too
TRAINERS = {(2, 64): "bench", (8, 768): "paper_m", (12, 1536): "paper_l"}
# tokens of a whole validation split, known without preparing it: the windows in the first 2,048 tokens of each of
# pysource's 82 held-out documents; one shard of DCLM
HELD_OUT = {"pysource": 131_328, "dclm": 80_000_000}
MOST = 2**40  # the largest count that can be planned
COUNTS = ("num_layers", "d_model", "num_heads", "d_expert", "num_shared_experts")


@dataclass(frozen=True)
class Recipe:
    """A training run without its hardware."""

    model: str | None  # a file of conf/model; None: changed by the user
    shape: TransformerShape
    trainer: str  # a file of conf/trainer
    changed: tuple[str, ...]  # the user's settings, as key=value
    steps: int
    global_batch: int  # sequences
    micro_batch: int  # sequences
    precision: str
    seq_len: int
    val_every: int  # steps
    val_at: str  # log: also after 1, 2, 4, 8 ... steps below val_every
    validation_tokens: int | None  # of a validation along the way; None: the whole split
    final_validation_tokens: int  # of the whole split, on which a run ends; assumed, if the user does not say it
    pes_every: int  # steps; 0: PES is not measured
    pes_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole training: steps * global_batch * seq_len."""
        return self.steps * self.global_batch * self.seq_len

    @property
    def validations(self) -> int:
        """Validations along the way: before the first step, after every `val_every`, and after the last."""
        early = (min(self.val_every, self.steps) - 1).bit_length() if self.val_at == "log" else 0  # powers of two below
        return 1 + early + math.ceil(self.steps / self.val_every)

    @property
    def tokens_of_validation(self) -> int:
        """Tokens of one validation along the way; it cannot be of more than there are."""
        return min(self.validation_tokens or self.final_validation_tokens, self.final_validation_tokens)

    @property
    def validated_tokens(self) -> int:
        """Tokens of all validations: those along the way, and the whole split once."""
        return self.validations * self.tokens_of_validation + self.final_validation_tokens

    @property
    def tokens_of_pes(self) -> int:
        """Tokens of one measurement of PES, which cannot be of more than there are either."""
        return min(self.pes_tokens, self.final_validation_tokens)

    @property
    def pes_measurements(self) -> int:
        """Measurements of PES: before the first step, after every `pes_every`, and of the trained model."""
        if not self.pes_every or self.shape.num_experts < 2:
            return 0
        return 1 + self.steps // self.pes_every + 1

    @property
    def source(self) -> str:
        """The config of conf/trainer that the numbers are from, and what the user has changed."""
        return f"trainer={self.trainer}" + (f", but {', '.join(self.changed)}" if self.changed else "")


class Printed(NamedTuple):
    """A row of table 1 as printed, in parameters; then the tokens and the 6 N T of the text."""

    embedding: int
    active: int
    total: int
    tokens: int  # of training, as rounded in the text
    flops: float  # as printed
    steps: int  # of 2^20 tokens; inferred from 19.9B and 78.6B tokens

    @property
    def product(self) -> int:
        """6 N T from printed numbers, exact: 2.84076e20 where the paper prints 2.840e20."""
        return 6 * (self.active - self.embedding) * self.tokens


_M, _B = 10**6, 10**9
PAPER = {
    "dense_m": Printed(77 * _M, 230 * _M, 230 * _M, 20 * _B, 1.836e19, 19_000),
    "moe_m": Printed(77 * _M, 230 * _M, 627 * _M, 20 * _B, 1.836e19, 19_000),
    "dense_l": Printed(154 * _M, 761 * _M, 761 * _M, 78 * _B, 2.840e20, 75_000),
    "moe_l": Printed(154 * _M, 761 * _M, 3140 * _M, 78 * _B, 2.840e20, 75_000),
}


def recipe_of(model: Any, accelerator: str, settings: dict[str, Any]) -> Recipe:
    """Return the recipe of a model with these keys of conf/model.

    Args:
        model: the keys of `model=NAME`; None if no name was given.
        accelerator: cpu or cuda; decides the precision where a config leaves it to the device, as training does.
        settings: steps, global_batch, micro_batch, precision, seq_len, vocab_size, and what decides the tokens that
            are not trained on: val_every, val_at, validation_tokens, final_validation_tokens, pes_every, pes_tokens;
            None: as the configs have it.

    Raises:
        UserError: a key has no sensible value, or there is no model.
    """
    name = _checked_name(model)
    trainer = TRAINERS.get((model["num_layers"], model["d_model"]), "default")
    source = "dclm" if trainer.startswith("paper") else "pysource"
    keys, data = read_option("trainer", trainer), read_option("data", source)
    automatic = "32-true" if accelerator == "cpu" else "bf16-mixed"
    usual = {
        "steps": keys["max_steps"],
        "precision": automatic if keys["precision"] == "auto" else keys["precision"],
        "final_validation_tokens": HELD_OUT[source],
        **{key: keys[key] for key in ("global_batch", "micro_batch", "val_every", "val_at", "pes_every", "pes_tokens")},
        **{key: data[key] for key in ("seq_len", "vocab_size", "validation_tokens")},
    }
    changed = {key: value for key, value in settings.items() if value is not None}
    for key in changed.keys() - {"precision", "val_at"}:
        whole_number(f"analysis.plan.{key}", changed[key], 0 if key == "pes_every" else 1, MOST)
    chosen = usual | changed
    shape = shape_of(model, chosen.pop("vocab_size"))
    return Recipe(name, shape, trainer, tuple(f"{key}={value}" for key, value in changed.items()), **chosen)


def shape_of(model: dict[str, Any], vocab_size: int) -> TransformerShape:
    """Return the shape of a model with these keys of conf/model; how its router weighs experts costs nothing."""
    numbers = {key: value for key, value in model.items() if key != "init_std"}
    return TransformerShape(vocab_size=vocab_size, gating="softmax", renormalize=True, **numbers)


def _checked_name(model: Any) -> str | None:
    """Return the file of conf/model that has these keys, which are checked; None if the user has changed them."""
    names = options("model")
    if model is None:
        raise UserError(f"analysis=plan needs model=NAME: there is {', '.join(names)}")
    typed(ModelConfig, model, "model.")
    for key in COUNTS:
        whole_number(f"model.{key}", model[key], 0, MOST)
    whole_number("model.head_dim", model["head_dim"] or 0, 0, MOST)
    return next((name for name in names if read_option("model", name) == model), None)


def read_option(group: str, option: str) -> dict[str, Any]:
    """Return the keys of an option, with those that it inherits."""
    return {key.removeprefix(f"{group}."): value for key, value in option_keys(group, option).items()}

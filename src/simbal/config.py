"""Typed schema of every config group, and the checks that need no torch.

Numbers live in conf/*.yaml; here each key has its type, its unit and its allowed values. `balancing` is the one open
group: a strategy's keys are those of its own YAML file, so that adding a strategy touches nothing here.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from simbal.errors import UserError


@dataclass
class ModelConfig:
    """A pre-norm decoder; `num_experts: 0` makes it dense."""

    num_layers: int
    d_model: int
    num_heads: int
    d_expert: int  # hidden width of one expert, or of the feed-forward of a dense model
    num_experts: int
    top_k: int
    rope_theta: float
    norm_eps: float
    init_std: float  # of every matrix but the router's, truncated at three


@dataclass
class RouterConfig:
    """How logits become a choice and its weights."""

    gating: str  # softmax | sigmoid
    renormalize: bool  # divide the chosen weights by their sum
    init: str  # auto (the strategy's own) | orthogonal | normal | normal_unit


@dataclass
class ExpertsConfig:
    """Which implementation computes the experts."""

    backend: str  # auto | reference | torch


@dataclass
class DataConfig:
    """What every source of text has."""

    source: str  # pysource | files | synthetic
    vocab_size: int
    seq_len: int
    validation_tokens: int | None  # None: the whole validation split
    validation_one_in: int
    cache_dir: str
    tokenizer_path: str | None


@dataclass
class PySourceConfig(DataConfig):
    """Python sources of installed packages."""

    packages: dict[str, str]  # name -> reference version
    strict: bool


@dataclass
class FilesConfig(DataConfig):
    """The user's own text."""

    files: Any  # a path or glob, or a list of them
    validation_files: Any
    text_key: str
    encoding: str


@dataclass
class SyntheticConfig(DataConfig):
    """A Markov chain of known entropy."""

    branching: int
    documents: int
    document_tokens: int
    seed: int


@dataclass
class OptimConfig:
    """The objective's fixed terms and the optimizer."""

    lr: float  # peak
    weight_decay: float
    betas: list[float]
    eps: float
    decay_router: bool
    warmup_steps: int
    z_loss_coef: float  # of the language-model head, not of the router
    grad_clip: float  # largest norm of the whole gradient; 0: no clipping
    aux_layer_reduce: str  # sum | mean of the auxiliary losses over layers


@dataclass
class TrainerConfig:
    """How long, in which pieces and in which precision."""

    max_steps: int
    global_batch: int  # sequences per optimizer step
    micro_batch: int  # sequences per forward pass
    precision: str  # auto | 32-true | bf16-mixed | bf16-true
    accelerator: str  # auto | cpu | cuda
    val_every: int  # steps; also validated before the first and after the last step
    log_every: int
    ckpt_every: int
    progress_bar: bool


@dataclass
class LoggerConfig:
    """Curves beside metrics.jsonl."""

    kind: str  # tensorboard | none


@dataclass
class Config:
    """One run."""

    name: str
    seed: int
    baseline: str
    output_dir: str
    model: ModelConfig
    router: RouterConfig
    balancing: dict[str, Any]
    experts: ExpertsConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig


DATA_SCHEMAS: dict[str, type[DataConfig]] = {
    "pysource": PySourceConfig,
    "files": FilesConfig,
    "synthetic": SyntheticConfig,
}
CHOICES = {
    "router.gating": ("softmax", "sigmoid"),
    "router.init": ("auto", "orthogonal", "normal", "normal_unit"),
    "experts.backend": ("auto", "reference", "torch"),
    "optim.aux_layer_reduce": ("sum", "mean"),
    "trainer.precision": ("auto", "32-true", "bf16-mixed", "bf16-true"),
    "trainer.accelerator": ("auto", "cpu", "cuda"),
    "logger.kind": ("tensorboard", "none"),
}
AT_LEAST_ONE = (
    "model.num_layers", "model.d_model", "model.num_heads", "model.d_expert", "data.seq_len", "data.validation_one_in",
    "trainer.max_steps", "trainer.global_batch", "trainer.micro_batch", "trainer.val_every", "trainer.log_every",
    "trainer.ckpt_every",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "model.num_experts", "model.top_k", "optim.lr", "optim.weight_decay", "optim.z_loss_coef",
    "optim.grad_clip", "optim.warmup_steps",
)  # fmt: skip


def integer_keys() -> set[str]:
    """Dotted keys whose value is a whole number: where `0-4` means 0,1,2,3,4."""
    return {key for schema in (Config, *_data_variants()) for key in _keys_of_type(schema, int)}


def _data_variants() -> list[type]:
    from dataclasses import make_dataclass

    return [make_dataclass("Data", [("data", schema)]) for schema in DATA_SCHEMAS.values()]


def _keys_of_type(schema: Any, kind: type, prefix: str = "") -> list[str]:
    keys = []
    for field in fields(schema):
        if is_dataclass(field.type):
            keys += _keys_of_type(field.type, kind, f"{prefix}{field.name}.")
        elif field.type in (kind, kind | None):
            keys.append(prefix + field.name)
    return keys


def check(config: dict[str, Any]) -> None:
    """Raise `UserError` unless the resolved `config` has exactly the schema's keys and sensible values."""
    _check_types(config)
    flat = flatten(config)
    for key, allowed in CHOICES.items():
        if flat[key] not in allowed:
            raise UserError(f"{key}={flat[key]} is not one of {', '.join(allowed)}")
    for key in AT_LEAST_ONE:
        if flat[key] < 1:
            raise UserError(f"{key}={flat[key]} must be at least 1")
    for key in NOT_NEGATIVE:
        if not 0 <= flat[key] < float("inf"):
            raise UserError(f"{key}={flat[key]} must be a finite number of at least 0")
    _check_model(config)
    _check_data(config["data"])
    _check_batch(config["trainer"], config["optim"])


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to one dict of dotted keys; an empty dict stays a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_types(config: dict[str, Any]) -> None:
    missing = [key for key, value in flatten(config).items() if value == "???"]
    if missing:
        raise UserError(f"{missing[0]} has no value: give it on the command line as {missing[0]}=...")
    source = config["data"].get("source")
    if source not in DATA_SCHEMAS:
        raise UserError(f"data.source={source} is not one of {', '.join(DATA_SCHEMAS)}")
    schema = OmegaConf.structured(Config)
    schema.data = OmegaConf.structured(DATA_SCHEMAS[source])
    try:
        OmegaConf.merge(schema, config)
    except OmegaConfBaseException as error:
        sentence = str(error).splitlines()[0]
        raise UserError(f"{error.full_key or 'config'}: {sentence}") from None


def _check_model(config: dict[str, Any]) -> None:
    model, router, strategies = config["model"], config["router"], config["balancing"]
    num_experts, top_k, d_model = model["num_experts"], model["top_k"], model["d_model"]
    if d_model % (2 * model["num_heads"]):
        raise UserError(
            f"model.d_model={d_model} must be a multiple of twice model.num_heads={model['num_heads']}: "
            "rotary embeddings turn pairs of channels within each head"
        )
    if not num_experts:
        if [*strategies] != ["none"]:
            raise UserError(
                f"balancing={'_'.join(strategies)} has nothing to balance in a dense model "
                "(model.num_experts=0): use balancing=none"
            )
        return
    if not 1 <= top_k <= num_experts:
        raise UserError(f"model.top_k={top_k} must lie between 1 and model.num_experts={num_experts}")
    if router["init"] == "orthogonal" and num_experts > d_model:
        raise UserError(
            f"model.num_experts={num_experts} rows cannot be orthogonal in model.d_model={d_model} dimensions: "
            f"use at most {d_model} experts, or another router.init"
        )


def _check_data(data: dict[str, Any]) -> None:
    vocab_size, validation = data["vocab_size"], data["validation_tokens"]
    if data["source"] != "synthetic" and not (257 <= vocab_size <= 100_257 or vocab_size == 100_277):
        raise UserError(f"data.vocab_size={vocab_size} must lie between 257 and 100257, or be 100277 (all of cl100k)")
    if validation is not None and validation < data["seq_len"]:
        raise UserError(f"data.validation_tokens={validation} must be null or at least data.seq_len={data['seq_len']}")


def _check_batch(trainer: dict[str, Any], optim: dict[str, Any]) -> None:
    if trainer["global_batch"] % trainer["micro_batch"]:
        raise UserError(
            f"trainer.global_batch={trainer['global_batch']} must be a multiple of "
            f"trainer.micro_batch={trainer['micro_batch']}"
        )
    if optim["warmup_steps"] >= trainer["max_steps"]:
        raise UserError(
            f"optim.warmup_steps={optim['warmup_steps']} must be below trainer.max_steps={trainer['max_steps']}"
        )

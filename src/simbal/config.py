"""Typed schema of every config group; no torch here.

Numbers live in conf/*.yaml; here each key has its type, its unit and its allowed values. `balancing` is the one open
group: a strategy's keys are those of its own YAML file, so that adding a strategy touches nothing here. The analyses of
evaluate.py are open in the same way.
"""

from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from simbal.data_config import DATA_SCHEMAS, DataConfig
from simbal.errors import UserError


@dataclass
class ModelConfig:
    """A pre-norm decoder; `num_experts: 0` makes it dense, with a feed-forward top_k * d_expert wide."""

    num_layers: int
    d_model: int
    num_heads: int
    d_expert: int  # hidden width of one expert
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

    backend: str  # auto | reference | torch | megablocks | fused


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
    micro_batch: int  # sequences per forward pass of a device
    precision: str  # auto | 32-true | bf16-mixed | bf16-true
    force_precision: bool  # bf16 also on a CPU without instructions for it
    accelerator: str  # auto | cpu | cuda
    devices: int  # that train one model together: GPUs, or processes on a CPU
    strategy: str  # auto | ddp | fsdp: how they do so
    activation_checkpointing: bool  # less memory, more time, the same bits
    compile: bool  # by torch.compile; the same to rounding
    val_every: int  # steps; also validated before the first and after the last step
    log_every: int
    ckpt_every: int
    ckpt_seconds: float  # a checkpoint is also due when the last one is older; 0: never
    skip_nonfinite: int  # steps with a NaN or infinite loss or gradient that are skipped before the run has diverged
    keep_every: int  # steps between weights that are kept for analyses; 0: none are
    pes_every: int  # steps between measurements of the experts' similarity, from step 0; 0: never
    pes_tokens: int  # of the validation split, on which it is measured
    progress_bar: bool


@dataclass
class LoggerConfig:
    """Curves beside metrics.jsonl."""

    kind: str  # tensorboard | csv | mlflow | wandb | none


@dataclass
class MLFlowConfig(LoggerConfig):
    """A store of MLflow."""

    tracking_uri: str | None  # None: sqlite in the output folder
    experiment: str | None  # None: the run's name=


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    project: str
    offline: bool  # kept in the run's folder until it is synced


@dataclass
class Config:
    """One run."""

    name: str
    seed: int
    baseline: str
    columns: list[str] | None
    dry_run: bool
    retry_failed: bool
    output_dir: str
    model: ModelConfig
    router: RouterConfig
    balancing: dict[str, Any]
    experts: ExpertsConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig


LOGGER_SCHEMAS: dict[str, type[LoggerConfig]] = {
    "tensorboard": LoggerConfig,
    "csv": LoggerConfig,
    "mlflow": MLFlowConfig,
    "wandb": WandbConfig,
    "none": LoggerConfig,
}


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """A composed config as plain dicts, less Hydra's part; `UserError` for an interpolation that leads nowhere."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        plain = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def integer_keys() -> set[str]:
    """Dotted keys whose value is a whole number: where `0-4` means 0,1,2,3,4."""
    return {key for schema in (Config, *_data_variants()) for key in _keys_of_type(schema, int)}


def _data_variants() -> list[type]:
    return [make_dataclass("Data", [("data", schema)]) for schema in DATA_SCHEMAS.values()]


def _keys_of_type(schema: Any, kind: type, prefix: str = "") -> list[str]:
    keys = []
    for field in fields(schema):
        if is_dataclass(field.type):
            keys += _keys_of_type(field.type, kind, f"{prefix}{field.name}.")
        elif field.type in (kind, kind | None):
            keys.append(prefix + field.name)
    return keys


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to one dict of dotted keys; an empty dict stays a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

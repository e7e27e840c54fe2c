"""Checks what Hydra composes, or a file holds: the result is a `Config`, or one sentence that says what is wrong.

A sweep checks every job before the first starts.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from simbal.config.schedule import Schedule
from simbal.config.schema import (
    CL100K_IDS,
    CL100K_RANKS,
    LAST_SHARD,
    VARIANTS,
    Config,
    DataConfig,
    DCLMConfig,
    FilesConfig,
    Key,
    MLFlowConfig,
    ModelConfig,
    RouterConfig,
    SyntheticConfig,
    TrainerConfig,
    fields_of,
)
from simbal.config.values import (
    Shared,
    accepts,
    check_kind,
    check_leaves,
    check_name,
    not_negative,
    require_no_credentials,
)
from simbal.errors import UserError

EXTRAS = ("mlflow", "wandb")  # loggers that are modules, which extras of the same names install
FAULTS = {
    re.compile("Environment variable '(.*)' not found"): "the environment variable {} is not set",
    re.compile("Interpolation key '(.*)' not found"): "${{{}}} names no key; a whole one is ${{optim.lr}}",
    re.compile("Unsupported interpolation type (.*)"): "${{{}:...}} means nothing; ${{oc.env:VARIABLE}} does",
    re.compile("Recursive interpolation detected"): "the value stands for itself",
}
STRATEGY = re.compile(r"\w[\w-]*")  # a name that is printed and logged
T = TypeVar("T")


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed config as plain dicts without Hydra's part; `UserError` for an interpolation that fails."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        plain = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {interpolation_fault(error)}") from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def interpolation_fault(error: OmegaConfBaseException) -> str:
    """Return in one sentence why a value with `${...}` has none."""
    said = str(error).splitlines()[0]
    for pattern, sentence in FAULTS.items():
        if found := pattern.search(said):
            return sentence.format(*found.groups())
    return said


def checked(plain: Any) -> Config:
    """Return the typed and checked config of a run.

    Raises:
        UserError: a key is missing, unknown or of another type, or values make no sense, alone or together.
    """
    config = typed(Config, plain)
    logger = config.logger.kind
    if logger in EXTRAS and find_spec(logger) is None:
        raise UserError(f"logger={logger} is not installed: pip install 'simbal[{logger}]'")
    check_together(config)
    for name, value in plain.items():
        of_group = _check_leaves_once if isinstance(value, Shared) else check_leaves
        of_group(value, name)
    return config


def check_together(config: Config) -> None:
    """Raise `UserError` unless the values of a config, of which each is right by itself, make sense together."""
    betas = config.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optim.betas={betas} must be two numbers of at least 0 and below 1")
    if not config.optim.eps:
        raise UserError("optim.eps=0 must be above 0: a gradient of 0 would be divided by 0")
    check_sizes(config.model)
    _check_router(config.model, config.router, config.balancing)
    _check_balancing(config.balancing, config.trainer.max_steps)
    _check_data(config.data)
    _check_batch(config.trainer)
    check_name("name", config.name)
    if not config.output_dir:
        raise UserError("output_dir is empty: give the path of a folder")
    if isinstance(config.logger, MLFlowConfig):
        require_no_credentials("logger.tracking_uri", config.logger.tracking_uri)


def checked_data(plain: Any) -> DataConfig:
    """Return the typed and checked group `data`; raise `UserError` as `checked` does."""
    data = typed(DataConfig, plain, "data.")
    _check_data(data)
    check_leaves(plain, "data")
    return data


def typed(schema: type[T], plain: Any, prefix: str = "") -> T:
    """Return an instance of `schema` with the values of `plain`, as they are.

    Args:
        schema: a dataclass, whose fields say their type and bounds.
        plain: keys with values.
        prefix: stands before each key in messages, such as `data.`.

    Raises:
        UserError: a key is missing, unknown, or has a value of another type or out of bounds.
    """
    if not isinstance(plain, Mapping):
        raise UserError(f"{prefix.removesuffix('.') or 'the config'}={plain} must be keys with values")
    variant = _variant(schema, plain, prefix)
    keys, values = fields_of(cast(type, variant)), dict(plain)
    unknown = [name for name in values if name not in keys]
    if unknown:
        raise UserError(f"there is no key {prefix}{unknown[0]}")
    for name, (kind, key, is_group) in keys.items():
        if is_group and name in values:
            of_group = _typed_once if isinstance(values[name], Shared) else typed
            values[name] = of_group(kind, values[name], f"{prefix}{name}.")
        elif name in values:
            _check_value(f"{prefix}{name}", values[name], kind, key)
        else:
            raise UserError(f"{prefix}{name} is missing: a YAML file must have it, and no override may delete it")
    return variant(**{name: values[name] for name in keys})


@lru_cache(maxsize=4096)
def _typed_once(schema: type[T], plain: Shared, prefix: str) -> T:
    return typed(schema, plain, prefix)


@lru_cache(maxsize=4096)
def _check_leaves_once(plain: Shared, key: str) -> None:
    check_leaves(plain, key)


def _variant(schema: type[T], plain: Mapping[str, Any], prefix: str) -> type[T]:
    """Return the form of a schema with several that `plain` names, such as `FilesConfig`; else `schema` itself."""
    if schema not in VARIANTS:
        return schema
    key, forms = VARIANTS[schema]
    form = plain.get(key)
    if not isinstance(form, str) or form not in forms:
        raise UserError(f"{prefix}{key}={form} is not one of {', '.join(forms)}")
    return forms[form]


def _check_value(name: str, value: Any, kind: Any, key: Key) -> None:
    if value == "???":
        raise UserError(f"{name} has no value: give it on the command line as {name}=...")
    if type(value) is not kind:
        check_kind(name, value, kind)
    if value is None or not key.bounded:
        return
    allowed = "null or " if accepts(None, kind) and kind is not Any else ""
    finite = "a finite number of " if kind is float else ""
    if key.most is not None and not key.least <= value <= key.most:
        raise UserError(f"{name}={value} must lie between {key.least} and {key.most}")
    if key.least is not None and not key.least <= value < math.inf:
        raise UserError(f"{name}={value} must be {allowed}{finite}at least {key.least}")
    if key.above is not None and not key.above < value < math.inf:
        raise UserError(f"{name}={value} must be {allowed}a finite number above {key.above}")


def check_sizes(model: ModelConfig) -> None:
    """Raise `UserError` unless a model of these sizes can be built."""
    if model.head_dim is None and model.d_model % (2 * model.num_heads):
        raise UserError(
            f"model.d_model={model.d_model} must be a multiple of twice model.num_heads={model.num_heads}: "
            "rotary embeddings turn pairs of channels within each head"
        )
    if model.head_dim is not None and model.head_dim % 2:
        raise UserError(f"model.head_dim={model.head_dim} must be even: rotary embeddings turn pairs of channels")
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise UserError(
            f"model.num_kv_heads={model.num_kv_heads} must divide model.num_heads={model.num_heads}, or be null for "
            "as many"
        )
    if model.num_shared_experts and not model.num_experts:
        raise UserError(
            f"model.num_shared_experts={model.num_shared_experts} stand beside experts that are chosen, and "
            "model.num_experts=0 has none: use model.num_shared_experts=0"
        )
    if model.num_experts and not 1 <= model.top_k <= model.num_experts:
        raise UserError(f"model.top_k={model.top_k} must lie between 1 and model.num_experts={model.num_experts}")


def _check_router(model: ModelConfig, router: RouterConfig, strategies: Mapping[str, Any]) -> None:
    if not model.num_experts and [*strategies] != ["none"]:
        raise UserError(
            f"balancing={'_'.join(strategies)} has nothing to balance in a dense model "
            "(model.num_experts=0): use balancing=none"
        )
    if router.init == "orthogonal" and model.num_experts > model.d_model:
        raise UserError(
            f"model.num_experts={model.num_experts} rows cannot be orthogonal in model.d_model={model.d_model} "
            f"dimensions: use at most {model.d_model} experts, or another router.init"
        )


def _check_balancing(strategies: Mapping[str, Any], max_steps: int) -> None:
    """Check what all strategies have in common; each one checks the rest when it is built."""
    if not strategies:
        raise UserError("balancing is empty: choose balancing=none")
    for name, keys in strategies.items():
        if not STRATEGY.fullmatch(name):
            raise UserError(f"balancing: {name!r} is no name of a strategy: it takes letters, digits, _ and -")
        if not isinstance(keys, dict) or not isinstance(keys.get("_target_"), str):
            raise UserError(f"balancing.{name}={keys} is no strategy with keys and values")
        if "coef" in keys:
            not_negative(f"balancing.{name}.coef", keys["coef"])
        Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), max_steps)


def _check_data(data: DataConfig) -> None:
    vocab_size, validation = data.vocab_size, data.validation_tokens
    largest_cut = CL100K_RANKS + 1  # one more id ends a text
    in_table = 257 <= vocab_size <= largest_cut or vocab_size == CL100K_IDS
    if not (isinstance(data, SyntheticConfig) or in_table):
        raise UserError(
            f"data.vocab_size={vocab_size} must lie between 257 and {largest_cut}, or be {CL100K_IDS} (all of cl100k)"
        )
    if not data.cache_dir:
        raise UserError("data.cache_dir is empty: give the path of a folder")
    if isinstance(data, DCLMConfig):
        require_no_credentials("data.location", data.location)
        _check_shards(data)
    if isinstance(data, FilesConfig):
        require_no_credentials("data.files", data.files)
        require_no_credentials("data.validation_files", data.validation_files)
    if validation is not None and validation < data.seq_len:
        raise UserError(f"data.validation_tokens={validation} must be null or at least data.seq_len={data.seq_len}")


def _check_shards(data: DCLMConfig) -> None:
    first, last = data.first_shard, data.first_shard + data.num_shards - 1
    if last > LAST_SHARD:
        raise UserError(
            f"data.first_shard={first} and data.num_shards={data.num_shards} end at shard {last}, past {LAST_SHARD}"
        )
    if first <= data.validation_shard <= last:
        raise UserError(
            f"data.validation_shard={data.validation_shard} is one of the training shards, {first} to {last}"
        )


def _check_batch(trainer: TrainerConfig) -> None:
    whole, part, devices = trainer.global_batch, trainer.micro_batch, trainer.devices
    if whole % (part * devices) == 0:
        return
    several = f" times trainer.devices={devices}" if devices > 1 else ""
    sizes = [str(size) for size in divisors(whole // devices)] if whole % devices == 0 else []
    raise UserError(
        f"trainer.global_batch={whole} must be a multiple of trainer.micro_batch={part}{several}"
        + (f"; trainer.micro_batch may be {', '.join(sizes)}" if sizes else f": use a multiple of {part * devices}")
    )


def divisors(number: int) -> list[int]:
    """Return all divisors of `number` in rising order, by trial division up to its square root."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]

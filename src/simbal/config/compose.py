"""Turns the config that Hydra composes, or that a file holds, into a checked `Config`."""

from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from simbal.config.messages import describe_validation_error, raise_config_errors
from simbal.config.schema import Config, Data, DataConfig
from simbal.config.values import flatten
from simbal.errors import ConfigError

EXTRAS = ("mlflow", "wandb")  # loggers that are installed by extras of the same name
MISSING = "???"
M = TypeVar("M")


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed config as plain dicts without the section `hydra`; `ConfigError` for a bad interpolation."""
    without_hydra = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    with raise_config_errors():
        plain = OmegaConf.to_container(without_hydra, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def validate(model: type[M], plain: Any, prefix: str = "") -> M:
    """Validate plain values; `ConfigError` for the first error. `prefix` is their dotted key with a final dot."""
    for key, value in flatten(plain, prefix).items() if isinstance(plain, dict) else ():
        if isinstance(value, str) and value == MISSING:
            raise ConfigError(f"{key} has no value: set {key}=VALUE")
    try:
        valid: M = _adapter(model).validate_python(plain)  # type: ignore[arg-type]
        return valid
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, prefix)) from None


@cache  # its first validation builds a schema in 10 ms
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def validate_config(plain: Any) -> Config:
    """Validate the config of a run before training.

    Raises:
        ConfigError: a key is missing, unknown or has a wrong value, values contradict each other, or the logger is not
            installed.
    """
    config = validate(Config, plain)
    logger = config.logger.kind
    if logger in EXTRAS and find_spec(logger) is None:
        raise ConfigError(f"logger={logger} is not installed: pip install 'simbal[{logger}]'")
    return config


def validate_data(plain: Any) -> DataConfig:
    """Validate the group `data`; `ConfigError` as in `validate_config`."""
    data: DataConfig = validate(Data, plain, "data.")  # type: ignore[arg-type]
    return data

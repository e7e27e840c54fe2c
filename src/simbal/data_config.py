"""Typed schema of the config group `data`, one class for each source; no torch here."""

from dataclasses import dataclass
from typing import Any


@dataclass
class DataConfig:
    """What every source of text has."""

    source: str  # pysource | files | dclm | synthetic
    vocab_size: int
    seq_len: int
    validation_tokens: int | None  # None: the whole validation split
    validation_one_in: int
    cache_dir: str
    tokenizer_path: str | None
    threads: int | None  # that encode text; None: one per core
    document_mask: bool  # attention stays within a document


@dataclass
class PySourceConfig(DataConfig):
    """Python sources of installed packages."""

    packages: dict[str, str]  # name -> reference version
    strict: bool


@dataclass
class FilesConfig(DataConfig):
    """The user's own text."""

    files: Any  # a path, URL or glob, or a list of them
    validation_files: Any
    text_key: str
    encoding: str
    txt_split: str  # file | blank_lines
    on_bad_record: str  # error | skip


@dataclass
class DCLMConfig(DataConfig):
    """Shards of DCLM, one of which is held out."""

    location: str  # a URL or path with {shard} in it
    first_shard: int
    num_shards: int
    validation_shard: int
    text_key: str
    on_bad_record: str  # error | skip


@dataclass
class SyntheticConfig(DataConfig):
    """A Markov chain of known entropy."""

    branching: int
    documents: int
    document_tokens: int
    seed: int


DATA_SCHEMAS: dict[str, type[DataConfig]] = {
    "pysource": PySourceConfig,
    "files": FilesConfig,
    "dclm": DCLMConfig,
    "synthetic": SyntheticConfig,
}

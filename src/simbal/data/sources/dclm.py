"""The source `dclm`: shards of DCLM's pool, the paper's data, raw web text, multilingual and not deduplicated.

The text stays under Common Crawl's terms of use; simbal redistributes none of it. DCLM's README marks this route as
deprecated, for some of its files are broken (mlfoundations/dclm issue 110): a broken shard stops the build.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simbal.data.document import SPLITS
from simbal.data.sources.corpus import Corpus, FileSource
from simbal.data.sources.inputs import Input, local_path, name_of
from simbal.data.sources.records import Format
from simbal.data.sources.remote import hub_file, is_url, path_of
from simbal.errors import UserError

_SHARD = re.compile(r"\{shard(?::0(\d+)d)?\}")
_FEW = 8  # shards that a command names one by one


@dataclass(frozen=True)
class DCLM(FileSource):
    """The shards `first_shard`, `first_shard + 1`, ... for training and one more, whole, for validation."""

    location: str
    first_shard: int
    num_shards: int
    validation_shard: int
    text_key: str
    on_bad_record: str
    cache_dir: str

    def __post_init__(self) -> None:
        if not _SHARD.search(self.location):
            raise UserError(
                f"data.location={self.location} must contain {{shard}}, or {{shard:08d}} for eight digits: "
                "the number of each shard is put there"
            )

    def identity(self) -> dict[str, Any]:
        """Return the keys that decide the documents; a local shard has its size and time, a remote one its URL."""
        files = [item.identity() for item in self.corpus.inputs]
        return {"files": files, "text_key": self.text_key, "on_bad_record": self.on_bad_record}

    @cached_property
    def corpus(self) -> Corpus:
        """The training shards by number, then the validation shard."""
        splits = [SPLITS[0]] * self.num_shards + [SPLITS[1]]
        inputs = [self._input(split, shard) for split, shard in zip(splits, self._shards, strict=True)]
        return Corpus(inputs, Format(self.text_key), self.on_bad_record, None, Path(self.cache_dir))

    @property
    def _shards(self) -> list[int]:
        return [*range(self.first_shard, self.first_shard + self.num_shards), self.validation_shard]

    def _input(self, split: str, shard: int) -> Input:
        location = _fill(self.location, shard)
        try:
            return Input.at(split, location if is_url(location) else str(local_path(location).absolute()))
        except UserError as error:
            raise UserError(f"data.location with shard={shard}: {error}") from None

    def by_hand(self, unit: str) -> str:
        """Return the commands that fetch all shards on a machine with network and read them here."""
        location = name_of(self.location)
        if found := hub_file(location):
            repository, options, file = found
            fetch = f"  hf download {repository} {self._arguments(file)} {options} --local-dir DIR"
        else:
            address = path_of(location)
            file = address.rpartition("/")[2]
            file = file if _SHARD.search(file) else address.rpartition("://")[2]
            fetch = f"  fetch the {self.num_shards + 1} files of {location} into a folder DIR"
        keys = ("first_shard", "num_shards", "validation_shard")
        chosen = " ".join(f"data.{key}={getattr(self, key)}" for key in keys)
        place = shlex.quote(f'data.location="DIR/{file}"')  # Hydra takes braces only within quotes of its own
        return f". To read copies made by hand:\n{fetch}\n  python prepare.py data=dclm {place} {chosen}"

    def _arguments(self, file: str) -> str:
        """Return the files' names as arguments of a shell command."""
        if len(self._shards) <= _FEW or len(_SHARD.findall(file)) > 1:
            return " ".join(_fill(file, shard) for shard in self._shards)
        printed = _SHARD.sub(lambda match: f"%0{match[1]}d" if match[1] else "%d", file)
        return f"$(printf '{printed} ' $(seq {self._shards[0]} {self._shards[-2]}) {self._shards[-1]})"


def _fill(template: str, shard: int) -> str:
    return _SHARD.sub(lambda match: str(shard).zfill(int(match[1] or 0)), template)

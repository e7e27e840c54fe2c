"""The source `dclm`: shards of DCLM's pool, the paper's data, raw web text, multilingual and not deduplicated.

The text stays under Common Crawl's terms of use; simbal redistributes none of it. DCLM's README marks this route as
deprecated, for some of its files are broken (mlfoundations/dclm issue 110): a broken shard stops the build.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simbal.data.document import SPLITS, Document
from simbal.data.sources.corpus import Corpus
from simbal.data.sources.inputs import Input, local_path, name_of
from simbal.data.sources.records import Format
from simbal.data.sources.remote import UnreachableError, is_url, path_of
from simbal.errors import HIDDEN, UserError

_SHARD = re.compile(r"\{shard(?::0(\d+)d)?\}")
_FEW = 8  # shards that a command names one by one


@dataclass(frozen=True)
class DCLM:
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
        inputs = self._inputs()
        return {
            "files": [item.identity() for item in inputs],
            "text_key": self.text_key,
            "on_bad_record": self.on_bad_record,
        }

    def units(self) -> list[str]:
        """Return the names of the training shards by number, then of the validation shard."""
        return [item.name for item in self._corpus.inputs]

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents of a shard.

        Raises:
            UserError: for the first thing in it that makes no sense, with its place, or if it cannot be had.
        """
        try:
            yield from self._corpus.read(unit, skipped)
        except UnreachableError as error:
            raise UserError(f"{unit} cannot be fetched ({error}). {self._by_hand()}") from None

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus(self._inputs(), Format(self.text_key), self.on_bad_record, None, Path(self.cache_dir))

    @property
    def _shards(self) -> list[int]:
        return [*range(self.first_shard, self.first_shard + self.num_shards), self.validation_shard]

    def _inputs(self) -> list[Input]:
        inputs: list[Input] = []
        for shard in self._shards:
            location = _fill(self.location, shard)
            try:
                location = location if is_url(location) else str(local_path(location).absolute())
                inputs.append(Input.at(SPLITS[len(inputs) == self.num_shards], location))
            except UserError as error:
                raise UserError(f"data.location with shard={shard}: {error}") from None
        return inputs

    def _by_hand(self) -> str:
        """Return the commands that fetch the shards on a machine with network and read them here."""
        location = name_of(self.location)
        address = path_of(location)
        folder, _, file = address.rpartition("/")
        file = file if _SHARD.search(file) else address.rpartition("://")[2].removeprefix(f"{HIDDEN}@")
        fetch = f"  fetch the {self.num_shards + 1} files of {location} into a folder DIR"
        if folder.startswith("hf://datasets/"):
            owner, name, *within = folder.removeprefix("hf://datasets/").split("/")
            name, _, revision = name.partition("@")
            at = f" --revision {revision}" if revision not in ("", "main") else ""
            file = "/".join([*within, file])
            fetch = f"  hf download {owner}/{name} {self._arguments(file)} --repo-type dataset{at} --local-dir DIR"
        keys = ("first_shard", "num_shards", "validation_shard")
        chosen = " ".join(f"data.{key}={getattr(self, key)}" for key in keys)
        place = shlex.quote(f'data.location="DIR/{file}"')  # Hydra takes braces only within quotes of its own
        return f"To read copies made by hand:\n{fetch}\n  python prepare.py data=dclm {place} {chosen}"

    def _arguments(self, file: str) -> str:
        """Return the files' names as arguments of a shell command."""
        if len(self._shards) <= _FEW or len(_SHARD.findall(file)) > 1:
            return " ".join(_fill(file, shard) for shard in self._shards)
        printed = _SHARD.sub(lambda match: f"%0{match[1]}d" if match[1] else "%d", file)
        return f"$(printf '{printed} ' $(seq {self._shards[0]} {self._shards[-2]}) {self._shards[-1]})"


def _fill(template: str, shard: int) -> str:
    return _SHARD.sub(lambda match: str(shard).zfill(int(match[1] or 0)), template)

"""The source `files`: the user's own .txt, .jsonl (plain, .gz, .zst) and .parquet, local or behind URLs."""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from simbal.data.document import SPLITS
from simbal.data.sources.corpus import Corpus, FileSource
from simbal.data.sources.inputs import Input, check_once, find_inputs
from simbal.data.sources.records import Format
from simbal.data.sources.remote import UnreachableError
from simbal.errors import UserError


@dataclass(frozen=True)
class Files(FileSource):
    """Paths, URLs and globs; without `validation_files`, one document in `validation_one_in` of `files` is held out."""

    files: Any
    validation_files: Any
    text_key: str
    encoding: str
    txt_split: str
    on_bad_record: str
    validation_one_in: int
    cache_dir: str
    ends: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._format.check()

    def identity(self) -> dict[str, Any]:
        """Return the keys that decide the documents, with the identity of each file.

        A local file has its size and time of change, by which another content is noticed; a remote one its URL.
        """
        keys = ("text_key", "encoding", "txt_split", "on_bad_record", "validation_one_in")
        files = [item.identity() for item in self._named()]
        return {"files": files} | {key: getattr(self, key) for key in keys}

    def by_hand(self, unit: str) -> str:
        """Return the command that fetches the file, if one is known, and the key that then names the copy."""
        return f": {next(item for item in self.corpus.inputs if item.name == unit).by_hand()}"

    @property
    def _format(self) -> Format:
        return Format(self.text_key, self.encoding, self.txt_split)

    @cached_property
    def corpus(self) -> Corpus:
        """The files in the order given, the matches of a glob by name."""
        inputs = [one for item in self._named() for one in _expanded(item)]
        check_once(inputs)
        one_in = None if self.validation_files else self.validation_one_in
        return Corpus(inputs, self._format, self.on_bad_record, one_in, Path(self.cache_dir), self.ends)

    def by_ends(self) -> "FileEnds | None":
        """Return the source that holds out ends of these documents; None where the user says what is held out."""
        if self.validation_files or self.validation_one_in == 1:
            return None
        return FileEnds(**{field.name: getattr(self, field.name) for field in fields(self)})

    def _named(self) -> list[Input]:
        """Return the inputs as far as they can be named without a network."""
        if not self.files:
            raise UserError("data.files is empty: give a path, a URL, a glob or a list of them")
        inputs = find_inputs(SPLITS[0], self.files) + find_inputs(SPLITS[1], self.validation_files or [])
        check_once(inputs)
        return inputs


class FileEnds(Files):
    """The same files where none of their few documents is held out: the end of each is, in its place."""

    ends = True


def _expanded(item: Input) -> list[Input]:
    try:
        return item.expanded()
    except UnreachableError as error:
        raise UserError(f"{item.name} cannot be listed ({error}): {item.by_hand()}") from None

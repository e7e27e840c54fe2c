"""Documents, and the sources `pysource` and `synthetic`; `files` and `dclm` are in simbal.data.files."""

import base64
import csv
import hashlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simbal.errors import UserError

SPLITS = TRAIN, VALIDATION = ("train", "validation")
MIN_BYTES = 64  # smallest pysource file; smaller files are mostly an empty `__init__.py`
SKIPPED_FILES = {  # reason: pattern
    "tests or vendored code": re.compile(r"(^|/)(tests?|testing|_?vendor|vendored)/"),
    "differs between builds": re.compile(r"torch/version\.py$|numpy/(__config__|version)\.py$|numpy/distutils/"),
    "generated": re.compile(r"torch/_inductor/fx_passes/serialized_patterns/|(omegaconf|hydra)/grammar/gen/"),
}
SUCCESSORS, WALK = 0, 1  # random streams of the synthetic chain


class Document(NamedTuple):
    """A piece of text that belongs to one split."""

    split: str  # one of SPLITS
    content: bytes  # UTF-8 text, or the symbols of a synthetic document
    progress: float  # fraction of its input that has been read, 0 to 1


def sha256_of(content: bytes) -> bytes:
    """Return the sha256 of a document's content, 32 bytes."""
    return hashlib.sha256(content).digest()


def split_of(content: bytes, validation_one_in: int) -> str:
    """Return a document's split: its hash holds out about one document in `validation_one_in`.

    Adding a file therefore moves no other document to another split.
    """
    return VALIDATION if int.from_bytes(sha256_of(content)[:8], "big") % validation_one_in == 0 else TRAIN


class Source:
    """A source of documents of the two splits."""

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the documents, as JSON values, without reading text or using a network."""
        raise NotImplementedError

    def inputs(self, splits: Sequence[str] = SPLITS) -> list[str]:
        """Return the names of the inputs that may contain documents of `splits`; preparation resumes between inputs."""
        return [type(self).__name__.lower()]

    def read(self, name: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the documents of an input in a fixed order; count skipped or changed records in `skipped` by reason.

        Raises:
            UserError: for the first bad record, with its position.
        """
        raise NotImplementedError

    def with_ends_held_out(self) -> "Source | None":
        """Return the same source with the end of each document held out, or None if that is not possible."""
        return None


@dataclass(frozen=True)
class PySource(Source):
    """Python files of installed packages (name -> expected version), verified against each package's RECORD.

    It is code, not web text: use it to test the pipeline and to rank methods at toy scale. The expected versions have
    the same files in every wheel (CPU and CUDA, Linux and macOS), so the corpus is reproducible. 12.0% of the 13-token
    windows of validation also occur in train (license headers, boilerplate).
    """

    packages: dict[str, str]
    strict: bool
    validation_one_in: int

    def identity(self) -> dict[str, Any]:
        """Return each package's version and the sha256 of its RECORD, which lists the sha256 of every file.

        Raises:
            UserError: a package is missing or, with `strict`, does not have the expected version.
        """
        installed = {}
        for name, expected in self.packages.items():
            package = _find_package(name, expected)
            if self.strict and not _has_version(package, expected):
                remedy = f"pip install {name}=={expected}, or set data.strict=false"
                raise UserError(f"data.strict=true needs {name}=={expected}, not {package.version}: {remedy}")
            installed[name] = [package.version, sha256_of(_read_record(name, package).encode()).hex()]
        return {"packages": installed, "validation_one_in": self.validation_one_in}

    def read(self, name: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the distinct files, sorted by sha256, so that neither paths nor the order of packages matter."""
        contents: dict[bytes, bytes] = {}
        for package_name, expected in self.packages.items():
            package = _find_package(package_name, expected)
            if not _has_version(package, expected):
                warnings.warn(
                    f"data=pysource reads {package_name} {package.version}, but {expected} is expected: "
                    "the corpus and its fingerprint differ from the published ones",
                    stacklevel=1,
                )
            for content in _source_files(package_name, package, skipped):
                digest = sha256_of(content)
                skipped["duplicate"] += digest in contents
                contents[digest] = content
        for number, (_, content) in enumerate(sorted(contents.items()), 1):
            yield Document(split_of(content, self.validation_one_in), content, number / len(contents))


def _find_package(name: str, expected: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        remedy = f"pip install {name}=={expected}, or set data.packages"
        raise UserError(f"data=pysource needs {name}, which is not installed: {remedy}") from None


def _has_version(package: Distribution, expected: str) -> bool:
    """Return whether the version is the expected one; 2.13.0+cpu and 2.13.0+cu130 contain the same files."""
    return package.version.split("+")[0] == str(expected)


def _read_record(name: str, package: Distribution) -> str:
    record = package.read_text("RECORD")  # `Distribution.files` of Python 3.12 omits missing files
    if not record:
        raise UserError(f"data=pysource cannot verify {name}, which has no RECORD: install it with pip")
    return record


def _source_files(name: str, package: Distribution, skipped: Counter[str]) -> Iterator[bytes]:
    """Yield the content of each Python file of a package that belongs to the corpus."""
    reinstall = f"pip install --force-reinstall --no-deps {name}=={package.version}"
    rows = [row for row in csv.reader(_read_record(name, package).splitlines()) if row[0].endswith(".py")]
    if not rows:
        raise UserError(f"data=pysource finds no Python files in {name}: {reinstall}")
    for file, recorded, _ in rows:
        if reasons := [reason for reason, pattern in SKIPPED_FILES.items() if pattern.search(file)]:
            skipped[reasons[0]] += 1
            continue
        try:
            content = Path(str(package.locate_file(file))).read_bytes()
        except OSError as error:
            raise UserError(f"data=pysource cannot read {file} of {name} ({error.strerror}): {reinstall}") from None
        if recorded != "sha256=" + base64.urlsafe_b64encode(sha256_of(content)).rstrip(b"=").decode():
            raise UserError(f"data=pysource: {file} of {name} differs from its RECORD: {reinstall}")
        if len(content) >= MIN_BYTES:
            yield content
        else:
            skipped[f"under {MIN_BYTES} bytes"] += 1


@dataclass(frozen=True)
class Synthetic(Source):
    """A Markov chain in which each symbol has `branching` successors of equal probability.

    The entropy rate is exactly ln(branching) nats per symbol. Document i is a function of (chain_seed, i). The first
    `documents` are the train split, and the next few are the validation split.
    """

    vocab_size: int  # the last id is end of text, the others are the symbols
    branching: int
    documents: int
    document_tokens: int
    chain_seed: int
    validation_one_in: int

    def __post_init__(self) -> None:
        if not 1 <= self.branching < self.vocab_size:
            raise UserError(f"data.branching={self.branching} must be between 1 and {self.vocab_size - 1}")

    def identity(self) -> dict[str, Any]:
        """Return all keys of the source."""
        return asdict(self)

    def read(self, name: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the training documents, then the validation documents."""
        successors = [self._successors(symbol) for symbol in range(self.vocab_size - 1)]
        total = self.documents + math.ceil(self.documents / self.validation_one_in)
        for index in range(total):
            content = self._walk(successors, index).astype("<u4").tobytes()
            split = TRAIN if index < self.documents else VALIDATION
            yield Document(split, content, (index + 1) / total)

    def _successors(self, symbol: int) -> list[int]:
        random = np.random.default_rng([self.chain_seed, SUCCESSORS, symbol])
        successors: list[int] = random.choice(self.vocab_size - 1, self.branching, replace=False).tolist()
        return successors

    def _walk(self, successors: list[list[int]], index: int) -> NDArray[np.int64]:
        """Return the symbols of document `index`: a random first symbol, then random successors."""
        random = np.random.default_rng([self.chain_seed, WALK, index])
        symbols = [int(random.integers(self.vocab_size - 1))]
        for choice in random.integers(self.branching, size=self.document_tokens - 1).tolist():
            symbols.append(successors[symbols[-1]][choice])
        return np.array(symbols)

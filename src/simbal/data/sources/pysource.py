"""The source `pysource`: Python sources of installed packages, verified against each RECORD; real text, no download.

It is code, not web text: it checks the machinery and ranks methods at toy scale. The files of the listed versions are
byte for byte the same in every wheel of them seen (CPU and CUDA, Linux and macOS), so the corpus is reproducible. 12.0%
of the 13-token windows of validation also occur in train (licence headers, boilerplate); they stay.
"""

import base64
import csv
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from simbal.data.document import SPLITS, Document, digest_of, split_of
from simbal.errors import UserError

DROPPED = {
    "tests or vendored code": re.compile(r"(^|/)(tests?|testing|_?vendor|vendored)/"),
    "differs between builds": re.compile(r"torch/version\.py$|numpy/(__config__|version)\.py$|numpy/distutils/"),
    "generated": re.compile(r"torch/_inductor/fx_passes/serialized_patterns/|(omegaconf|hydra)/grammar/gen/"),
}
SMALLEST = 64  # bytes; smaller files are `__init__.py` with a line or none


@dataclass(frozen=True)
class PySource:
    """The `.py` files of `packages` (name -> reference version), read where they are installed."""

    packages: dict[str, str]
    strict: bool
    validation_one_in: int

    def identity(self) -> dict[str, Any]:
        """Return each package's version and the sha256 of its RECORD, which holds the sha256 of every file.

        Raises:
            UserError: a package is missing, or with `strict` of another version than the reference.
        """
        installed = {}
        for name, reference in self.packages.items():
            package = _find(name, reference)
            if self.strict and _differs(package, reference):
                raise UserError(
                    f"pysource with data.strict=true needs {name}=={reference}, but {package.version} is installed: "
                    f"pip install {name}=={reference} (or set data.strict=false)"
                )
            installed[name] = [package.version, sha256(_record(name, package).encode()).hexdigest()]
        return {"packages": installed, "validation_one_in": self.validation_one_in}

    def units(self, splits: Sequence[str] = SPLITS) -> list[str]:
        """Return a single unit, as the order of the files mixes the packages."""
        return ["packages"]

    def with_ends_held_out(self) -> None:
        """Return None: whole files are held out."""

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield files without duplicates by their sha256, so that neither paths nor the order of packages matter."""
        found: dict[bytes, bytes] = {}
        for name, reference in self.packages.items():
            package = _find(name, reference)
            if _differs(package, reference):
                warnings.warn(
                    f"pysource reads {name} {package.version}, the reference is {reference}: "
                    "the corpus and its fingerprint differ from the published ones",
                    stacklevel=1,
                )
            for content in _sources(name, package, skipped):
                digest = digest_of(content)
                if digest in found:
                    skipped["duplicate"] += 1
                else:
                    found[digest] = content
        total, done = sum(map(len, found.values())), 0
        for digest, content in sorted(found.items()):
            done += len(content)
            yield Document(split_of(digest, self.validation_one_in), content, digest, done / total)


def _find(name: str, reference: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise UserError(
            f"pysource needs {name}=={reference}, which is not installed: pip install {name}=={reference} "
            "(or set data.packages)"
        ) from None


def _differs(package: Distribution, reference: str) -> bool:
    """Return whether the version is not the reference; 2.13.0+cpu and 2.13.0+cu130 hold the same files."""
    return package.version.split("+")[0] != str(reference)


def _record(name: str, package: Distribution) -> str:
    record = package.read_text("RECORD")  # `Distribution.files` of Python 3.12 hides missing files
    if not record:
        raise UserError(f"pysource cannot verify {name}, which has no RECORD: install it with pip, or use data=files")
    return record


def _sources(name: str, package: Distribution, skipped: Counter[str]) -> Iterator[bytes]:
    """Yield each source file of a package that belongs to the corpus, verified."""
    reinstall = f"pip install --force-reinstall --no-deps {name}=={package.version}"
    rows = [row for row in csv.reader(_record(name, package).splitlines()) if row[0].endswith(".py")]
    kept = [row for row in rows if not _is_dropped(row[0], skipped)]
    is_editable = json.loads(package.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable")
    if not kept or is_editable:  # the RECORD of an editable install lists a stub in place of the sources
        raise UserError(f"pysource finds no sources in {name}, an editable or empty install: {reinstall}")
    for file, recorded, _ in kept:
        try:
            content = Path(str(package.locate_file(file))).read_bytes()
        except OSError as error:
            raise UserError(f"pysource cannot read {file} of {name} ({error.strerror}): {reinstall}") from None
        if recorded != "sha256=" + base64.urlsafe_b64encode(digest_of(content)).rstrip(b"=").decode():
            raise UserError(f"pysource: {file} of {name} is not what RECORD says: {reinstall}")
        if len(content) >= SMALLEST:
            yield content
        else:
            skipped[f"under {SMALLEST} bytes"] += 1


def _is_dropped(file: str, skipped: Counter[str]) -> bool:
    reasons = [reason for reason, pattern in DROPPED.items() if pattern.search(file)]
    skipped.update(reasons[:1])
    return bool(reasons)

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
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from simbal.data.document import Document, digest_of, split_of
from simbal.errors import UserError

DROPPED = {
    "tests or vendored code": re.compile(r"(^|/)(tests?|testing|_?vendor|vendored)/"),
    "differs between builds": re.compile(r"torch/version\.py$|numpy/(__config__|version)\.py$|numpy/distutils/"),
    "generated": re.compile(r"torch/_inductor/fx_passes/serialized_patterns/|(omegaconf|hydra)/grammar/gen/"),
}
SMALLEST = 64  # bytes; what is below are `__init__.py` with a line or none


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
        for package in self._installed():
            if self.strict and package.differs:
                raise UserError(
                    f"pysource with data.strict=true needs {package.name}=={package.reference}, but {package.version} "
                    f"is installed: pip install {package.name}=={package.reference} (or set data.strict=false)"
                )
            installed[package.name] = [package.version, sha256(package.record.encode()).hexdigest()]
        return {"packages": installed, "validation_one_in": self.validation_one_in}

    def units(self) -> list[str]:
        """Return a single unit, as the order of the files mixes the packages."""
        return ["packages"]

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield files without duplicates by their sha256, so that neither paths nor the order of packages matter."""
        found: dict[bytes, tuple[str, bytes]] = {}
        for package in self._installed():
            if package.differs:
                warnings.warn(
                    f"pysource reads {package.name} {package.version}, the reference is {package.reference}: "
                    "the corpus and its fingerprint differ from the published ones",
                    stacklevel=1,
                )
            for digest, content in package.sources(skipped):
                if digest in found:
                    skipped["duplicate"] += 1
                else:
                    found[digest] = package.name, content
        total, done = sum(len(content) for _, content in found.values()), 0
        for digest, (name, content) in sorted(found.items()):
            done += len(content)
            yield Document(split_of(digest, self.validation_one_in), name, content, digest, done / total)

    def _installed(self) -> "list[_Package]":
        return [_Package.find(name, str(reference)) for name, reference in self.packages.items()]


@dataclass(frozen=True)
class _Package:
    """An installed package; `record` is its list of files with their sha256."""

    name: str
    reference: str
    version: str
    record: str
    distribution: Distribution

    @classmethod
    def find(cls, name: str, reference: str) -> "_Package":
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise UserError(
                f"pysource needs {name}=={reference}, which is not installed: "
                f"pip install {name}=={reference} (or set data.packages)"
            ) from None
        record = package.read_text("RECORD")  # `Distribution.files` of Python 3.12 hides what is missing
        if not record:
            raise UserError(
                f"pysource cannot verify {name} {package.version}, which has no RECORD: install it with pip or uv, "
                "or use data=files"
            )
        return cls(name, reference, package.version, record, package)

    @property
    def differs(self) -> bool:
        """Whether the version is not the reference; 2.13.0+cpu and 2.13.0+cu130 hold the same files."""
        return self.version.split("+")[0] != self.reference

    @property
    def reinstall(self) -> str:
        return f"pip install --force-reinstall --no-deps {self.name}=={self.version}"

    def sources(self, skipped: Counter[str]) -> Iterator[tuple[bytes, bytes]]:
        """Yield digest and content of each file that belongs to the corpus."""
        rows = [row for row in csv.reader(self.record.splitlines()) if row[0].endswith(".py")]
        kept = [row for row in rows if not _dropped(row[0], skipped)]
        url = json.loads(self.distribution.read_text("direct_url.json") or "{}")
        if not kept or url.get("dir_info", {}).get("editable"):
            raise UserError(
                f"pysource finds no sources in {self.name} {self.version}, an editable or empty install: "
                f"{self.reinstall}"
            )
        for file, recorded, _ in kept:
            content = self._verified(file, recorded)
            if len(content) < SMALLEST:
                skipped[f"under {SMALLEST} bytes"] += 1
            else:
                yield digest_of(content), content

    def _verified(self, file: str, recorded: str) -> bytes:
        if not recorded.startswith("sha256="):
            raise UserError(
                f"pysource cannot verify {file} of {self.name} {self.version}, whose RECORD has no sha256 of it: "
                "install it with pip or uv, or use data=files"
            )
        try:
            content = Path(str(self.distribution.locate_file(file))).read_bytes()
        except OSError as error:
            raise UserError(
                f"pysource cannot read {file} of {self.name} {self.version} ({error.strerror}), "
                f"which RECORD lists as {recorded}: {self.reinstall}"
            ) from None
        found = "sha256=" + base64.urlsafe_b64encode(digest_of(content)).rstrip(b"=").decode()
        if found != recorded:
            raise UserError(
                f"pysource: {file} of {self.name} {self.version} was changed after its installation, "
                f"{found} instead of {recorded}: {self.reinstall}"
            )
        return content


def _dropped(file: str, skipped: Counter[str]) -> bool:
    reasons = [reason for reason, pattern in DROPPED.items() if pattern.search(file)]
    skipped.update(reasons[:1])
    return bool(reasons)

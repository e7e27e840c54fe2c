"""Python sources of installed packages, verified against each package's RECORD: real text without a download.

It is code, not web text: it checks the machinery and ranks methods at toy scale. The files of the listed versions are
byte for byte the same in every wheel of them seen (CPU and CUDA, Linux and macOS), so the corpus is reproducible.
10.1% of the 13-token windows of validation also occur in train (licence headers, boilerplate); they stay.
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

TESTS = re.compile(r"(^|/)(tests?|testing|_?vendor|vendored)/")
BUILD_DEPENDENT = re.compile(r"torch/version\.py$|numpy/(__config__|version)\.py$|numpy/distutils/")
GENERATED = re.compile(r"torch/_inductor/fx_passes/serialized_patterns/|(omegaconf/grammar|hydra/grammar)/gen/")
DROPPED = {"tests or vendored code": TESTS, "differs between builds": BUILD_DEPENDENT, "generated": GENERATED}
SMALLEST = 64  # bytes; below are empty `__init__.py` and the like


@dataclass(frozen=True)
class PySource:
    """The `.py` files of `packages` (name -> reference version), read where they are installed."""

    packages: dict[str, str]
    strict: bool
    validation_one_in: int

    def identity(self) -> dict[str, Any]:
        """Each package's version and the sha256 of its RECORD, which lists the sha256 of every file."""
        installed = {}
        for name, reference in self.packages.items():
            package = _installed(name, reference)
            if self.strict and _differs(package.version, reference):
                raise UserError(
                    f"pysource needs {name}=={reference}, but {package.version} is installed: "
                    f"pip install {name}=={reference} (or set data.strict=false)"
                )
            installed[name] = [package.version, sha256(_record(package, name).encode()).hexdigest()]
        return {"packages": installed, "validation_one_in": self.validation_one_in}

    def read(self, skipped: Counter[str]) -> Iterator[Document]:
        """Files without duplicates, by their sha256: neither paths nor the order of packages matter."""
        found: dict[bytes, tuple[str, bytes]] = {}
        for name, reference in self.packages.items():
            package = _installed(name, reference)
            if _differs(package.version, reference):
                warnings.warn(
                    f"pysource reads {name} {package.version}, the reference is {reference}: "
                    "the corpus and its fingerprint differ from the published ones",
                    stacklevel=1,
                )
            for content in _sources(package, name, skipped):
                digest = digest_of(content)
                skipped["duplicate"] += digest in found
                found.setdefault(digest, (f"{name}=={package.version}", content))
        total, read = sum(len(content) for _, content in found.values()), 0
        for digest, (package_name, content) in sorted(found.items()):
            read += len(content)
            yield Document(split_of(digest, self.validation_one_in), package_name, content, digest, read / total)


def _installed(name: str, reference: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise UserError(
            f"pysource needs {name}=={reference}, which is not installed: "
            f"pip install {name}=={reference} (or set data.packages)"
        ) from None


def _differs(version: str, reference: str) -> bool:
    return version.split("+")[0] != reference  # 2.13.0+cpu and 2.13.0+cu130 hold the same files


def _record(package: Distribution, name: str) -> str:
    """The package's list of files; read here because `Distribution.files` of Python 3.12 hides missing ones."""
    record = package.read_text("RECORD")
    if record is None:
        raise UserError(
            f"pysource cannot verify {name} {package.version}, which has no RECORD: install it with pip or uv, "
            "or use data=files"
        )
    return record


def _sources(package: Distribution, name: str, skipped: Counter[str]) -> Iterator[bytes]:
    """The verified contents of the package's files that belong to the corpus."""
    url = json.loads(package.read_text("direct_url.json") or "{}")
    rows = [row for row in csv.reader(_record(package, name).splitlines()) if row[0].endswith(".py")]
    kept = [row for row in rows if not _dropped(row[0], skipped)]
    if not kept or url.get("dir_info", {}).get("editable"):
        raise UserError(
            f"pysource finds no sources in {name} {package.version}, an editable or partial install: "
            f"pip install --force-reinstall --no-deps {name}=={package.version}"
        )
    for file, recorded, _ in kept:
        content = _verified(package, name, file, recorded)
        if len(content) >= SMALLEST:
            yield content
        else:
            skipped[f"under {SMALLEST} bytes"] += 1


def _dropped(file: str, skipped: Counter[str]) -> bool:
    reasons = [reason for reason, pattern in DROPPED.items() if pattern.search(file)]
    skipped.update(reasons[:1])
    return bool(reasons)


def _verified(package: Distribution, name: str, file: str, recorded: str) -> bytes:
    if not recorded.startswith("sha256="):
        raise UserError(
            f"pysource cannot verify {file} of {name} {package.version}, whose RECORD has no sha256 of it: "
            "install it with pip or uv, or use data=files"
        )
    try:
        content = Path(str(package.locate_file(file))).read_bytes()
    except OSError as error:
        content, found = b"", f"cannot be read ({error.strerror})"
    else:
        found = "sha256=" + base64.urlsafe_b64encode(digest_of(content)).rstrip(b"=").decode()
    if found != recorded:
        raise UserError(
            f"pysource: {file} of {name} {package.version} is not what was installed, {found} against {recorded}: "
            f"pip install --force-reinstall --no-deps {name}=={package.version}"
        )
    return content

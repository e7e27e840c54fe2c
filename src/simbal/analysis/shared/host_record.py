"""The file that says which model the analyses beside it have measured, on which text: `<results>/model.json`.

No torch here: `report.py` reads it.
"""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simbal.errors import UserError
from simbal.files.disk import refusals_of_disk, write_json
from simbal.runs.record import sealed, unsealed

FILE = "model.json"
# keys that decide the numbers
DECIDES = ("digests", "tokenizer", "context", "dtype", "data", "document_tokens", "seed")
PACKAGES = ("simbal", "torch", "transformers")


@dataclass(frozen=True)
class HostRecord:
    """The content of a model.json."""

    path: Path  # the folder of the results
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the model, that of its folder."""
        return self.path.name

    @property
    def circumstances(self) -> str:
        """A sentence on the text, the tokenizer and the precision."""
        data = self.content["data"]
        return (
            f"{self.name}: {self.content['source']}, data {data['source']}, tokens {data['tokens'][:12]} of its own "
            f"tokenizer, {self.content['context']:,} in a window, {self.content['dtype']}"
        )


def is_host(path: Path) -> bool:
    """Whether a folder holds what was measured of a model of Hugging Face."""
    return (path / FILE).is_file()


def read_host_record(path: Path) -> HostRecord:
    """Return what was measured in a folder; `UserError` if the file is broken."""
    file = path / FILE
    try:
        content = unsealed(file.read_bytes())
        if not all(key in content for key in (*DECIDES, "source")) or not isinstance(content["data"], dict):
            raise ValueError("a part is missing")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is broken ({error}): delete {path} and measure the model again") from None
    return HostRecord(path, content)


def require_same(path: Path, decides: dict[str, Any]) -> None:
    """Raise `UserError` if what lies in a folder was measured of another model, or on another text."""
    if not is_host(path):
        return
    there = read_host_record(path).content
    for key, value in sealed(decides).items():
        if key in DECIDES and there[key] != value:
            raise UserError(
                f"{path} holds what was measured with another {key} ({_shown(there[key])}, not {_shown(value)}): "
                "choose another name=, or delete the folder"
            )


def write_host_record(path: Path, content: dict[str, Any]) -> None:
    """Write model.json into a folder of results, unless it is there."""
    if is_host(path):
        return
    versions = {"versions": {name: importlib.metadata.version(name) for name in PACKAGES}}
    with refusals_of_disk(path):
        path.mkdir(parents=True, exist_ok=True)
    write_json(path / FILE, sealed(content | versions))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("tokens", value.get("weights", value))
    return str(value)[:16]

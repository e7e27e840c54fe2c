"""Hugging Face models with random weights, saved as folders, and text to measure them on."""

from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from simbal.data.tokenizer import load_tokenizer
from simbal.hf.export import write_tokenizer
from simbal.hf.load import HFRequest
from simbal.hf.model import HFModel
from tests.conftest import CONF
from tests.hf.architectures import architecture

IDS, CONTEXT = 300, 64


def guide() -> str:
    """Return the text of all guides."""
    pages = sorted((CONF.parent / "docs" / "guide").glob("*.md"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model with a byte-level tokenizer of `IDS` ids."""
    model.save_pretrained(folder)
    write_tokenizer(load_tokenizer(IDS), CONTEXT, folder)
    return folder


def saved(folder: Path, name: str, **changes: object) -> Path:
    """Save a model of an architecture in `folder`/`name`."""
    return save(architecture(name, vocab_size=IDS, **changes), folder / name)


def write_text(folder: Path) -> Path:
    """Write documents on six subjects, of about 1,500 bytes each."""
    things = ["router", "expert", "token", "layer", "gate", "loss"]
    texts = [
        " ".join(f"The {things[a % 6]} no. {a * b % 97} sees {things[b % 6]}s: x = {a} + {b};" for b in range(40))
        for a in range(1, 25)
    ]
    file = folder / "text.txt"
    file.write_text("\n\n".join(texts))
    return file


def request(folder: Path, hf: Path, **changes: Any) -> HFRequest:
    """Return the keys of a command that measures the model `hf`, with everything else in `folder`."""
    if not (folder / "text.txt").exists():
        write_text(folder)
    data = yaml.safe_load((CONF / "data" / "files.yaml").read_text())
    own = {"files": str(folder / "text.txt"), "txt_split": "blank_lines", "validation_one_in": 5}
    data |= own | {"cache_dir": str(folder / "cache"), "location": None}
    keys = {
        "hf": str(hf), "name": "models", "context": None, "dtype": "auto", "data": data, "accelerator": "cpu",
        "output_dir": str(folder / "outputs"),
    }  # fmt: skip
    return HFRequest(**keys | changes)


def host_of(folder: Path, name: str, **changes: object) -> HFModel:
    """Return a model of an architecture, saved and loaded as by `hf=`."""
    return request(folder, saved(folder, name, **changes)).load()

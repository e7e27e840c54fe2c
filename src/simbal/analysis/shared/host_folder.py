"""The folder of a Hugging Face model: config.json, safetensors and a tokenizer; read before any weight is.

Nothing in it is executed: models come from the classes of transformers, and weights from safetensors alone.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest, sha256
from math import prod
from pathlib import Path
from typing import Any

from simbal.errors import UserError
from simbal.host.weight_files import CONFIG, INDEX, SINGLE, in_file, read_json, shards

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # files of a model on the hub
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
MOST_CONTEXT = 2048  # tokens of a window that nobody asked for
PATIENCE = 10  # seconds for the hub to answer


@dataclass(frozen=True)
class HostFolder:
    """A model's folder on this machine; `source` is what the user has called it."""

    source: str
    path: Path

    @property
    def name(self) -> str:
        """The name of its results' folder, and of its arm in tables."""
        last = self.source.rstrip("/").rpartition("/")[2] if HUB_NAME.fullmatch(self.source) else self.path.name
        return re.sub(r"[^A-Za-z0-9._-]+", "_", last).strip(".")[:100] or "model"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; `UserError` if it is missing or damaged."""
        if not (self.path / CONFIG).exists():
            raise UserError(f"{self.path / CONFIG} is missing: hf= takes the folder of a model of Hugging Face")
        return read_json(self.path / CONFIG)

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files of weights, by name; `UserError` if there are none, or an index names one that is missing."""
        if (self.path / SINGLE).exists():
            return [self.path / SINGLE]
        if (self.path / INDEX).exists():
            return [self.path / name for name in sorted(shards(self.path / INDEX))]
        if any([*self.path.glob(pattern)] for pattern in PICKLES):
            raise UserError(
                f"{self.path} has its weights in files that can hold programs, and no {SINGLE}: convert them to "
                "safetensors first, as by save_pretrained of transformers"
            )
        raise UserError(f"{self.path} has neither {SINGLE} nor {INDEX}")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """How many numbers of each kind the files hold, such as BF16."""
        counts: dict[str, int] = {}
        for file in self.weight_files:
            for weight in in_file(file).values():
                counts[weight.kind] = counts.get(weight.kind, 0) + prod(weight.shape)
        return counts

    @property
    def dtype(self) -> str | None:
        """The dtype that most numbers are in; None if that is of no float that models compute in."""
        return DTYPES.get(max(self._numbers, key=lambda kind: self._numbers[kind], default=""))

    @property
    def parameters(self) -> int:
        """The numbers in the files, tied weights once."""
        return sum(self._numbers.values())

    @property
    def context(self) -> int | None:
        """The longest window that its config allows; None if it says nothing."""
        text = self.config.get("text_config", self.config)
        longest = text.get("max_position_embeddings") if isinstance(text, dict) else None
        return longest if isinstance(longest, int) else None

    def window(self, asked: int | None) -> int:
        """Return the tokens of a window; `UserError` if more are asked for than the model takes."""
        if asked is None:
            return min(self.context or MOST_CONTEXT, MOST_CONTEXT)
        if self.context is not None and asked > self.context:
            raise UserError(
                f"context={asked} is longer than {self.source} takes: max_position_embeddings={self.context}"
            )
        return asked

    @cached_property
    def digests(self) -> dict[str, str]:
        """The sha256 of config.json, and one over those of all files of weights; all bytes are read."""
        files = []
        for file in self.weight_files:
            with file.open("rb") as opened:
                files.append(f"{file.name} {file_digest(opened, 'sha256').hexdigest()}")
        config = sha256((self.path / CONFIG).read_bytes()).hexdigest()
        return {"config": config, "weights": sha256("\n".join(files).encode()).hexdigest()}


def find_host(hf: Any) -> HostFolder:
    """Return the folder of the model that `hf=` names, fetched from the hub if it is a name of one there.

    Raises:
        UserError: there is no such folder, or it is no model's; or the hub does not give it.
    """
    if not isinstance(hf, str) or not hf:
        raise UserError(f"hf={hf} must be the path of a model's folder, or its name on the hub")
    if Path(hf).is_dir():
        return _checked(HostFolder(hf, Path(hf).resolve()))
    if not HUB_NAME.fullmatch(hf) or Path(hf).exists():
        raise UserError(f"hf={hf}: there is no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"hf={hf} is no folder, and the hub needs pip install 'simbal[hf]'") from None
    try:
        fetched = snapshot_download(hf, allow_patterns=WANTED, etag_timeout=PATIENCE)
    except Exception as error:  # of the network, of the hub, of a name that it does not know
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"hf={hf} is no folder here, and the hub does not give it: {said or type(error).__name__}"
        ) from None
    return _checked(HostFolder(hf, Path(fetched)))


def _checked(folder: HostFolder) -> HostFolder:
    """Return the folder; `UserError` unless it has a config and weights that can be read."""
    if not isinstance(folder.config.get("model_type"), str):
        raise UserError(f"{folder.path / CONFIG} names no model_type, by which transformers knows an architecture")
    if not folder.parameters:  # the headers of all files are read
        raise UserError(f"{folder.path} holds no weights")
    return folder

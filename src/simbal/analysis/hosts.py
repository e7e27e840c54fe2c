"""What `hf=` of evaluate.py asks for: a model of Hugging Face, the text to measure it on, and where results go."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simbal.analysis.shared.host_folder import HostFolder, find_host
from simbal.analysis.shared.host_loading import DTYPES, compute_dtype, load_host, require_transformers
from simbal.analysis.shared.host_model import HostModel
from simbal.analysis.shared.host_record import require_same, write_host_record
from simbal.config.compose import checked_data
from simbal.config.schema import DATA, DataConfig
from simbal.config.values import check_name, one_of, whole_number
from simbal.data.hub_tokenizer import HubTokenizer, load_hub_tokenizer
from simbal.data.loader import ValidationSplit
from simbal.data.store import Store, prepare
from simbal.errors import UserError
from simbal.training.build import resolve_device


@dataclass(frozen=True)
class HostRequest:
    """The keys of a command that measures a model of Hugging Face; `UserError` where they make no sense.

    Args:
        hf: a folder, or a name on the hub.
        name: of the folder of results, below `output_dir`.
        context: tokens of a window; None: as many as the model takes, at most 2,048.
        dtype: auto, float32, bfloat16 or float16.
        data: the group `data`, with its source.
        accelerator: auto, cpu or cuda.
        output_dir: the folder of all results.
    """

    hf: Any
    name: Any
    context: Any
    dtype: Any
    data: Any
    accelerator: str
    output_dir: str

    def __post_init__(self) -> None:
        check_name("name", self.name)
        one_of("dtype", self.dtype, ["auto", *DTYPES])
        if self.context is not None:
            whole_number("context", self.context, 1)

    @cached_property
    def folder(self) -> HostFolder:
        """The model's folder."""
        require_transformers()
        return find_host(self.hf)

    @property
    def results(self) -> Path:
        """The folder that holds model.json and the folder `analysis`."""
        return Path(self.output_dir, self.name, self.folder.name)

    @cached_property
    def config(self) -> DataConfig:
        """The typed group `data`."""
        return text_config(self.data)

    @cached_property
    def text(self) -> HubTokenizer:
        """The model's own tokenizer."""
        return load_hub_tokenizer(self.folder.path)

    @cached_property
    def store(self) -> Store:
        """The validation split in the model's tokens."""
        return held_out_text(self.config, self.text)

    @cached_property
    def validation(self) -> ValidationSplit:
        """Its windows."""
        return windows(self.store, self.config, self.folder.window(self.context))

    @cached_property
    def decides(self) -> dict[str, Any]:
        """All that decides the numbers beside the keys of an analysis."""
        return {
            "digests": self.folder.digests,
            "tokenizer": self.text.table_sha256,
            "context": int(self.validation.windows_WT.shape[1]) - 1,
            "dtype": compute_dtype(self.folder, self.dtype, resolve_device(self.accelerator)),
            "data": {"source": self.config.source, **self.store.fingerprints},
            "document_tokens": self.validation.document_tokens,
            "seed": self.validation.seed,
        }

    def require_results(self) -> Path:
        """Return the folder of results; `UserError` if another model or text was measured there."""
        require_same(self.results, self.decides)
        return self.results

    def load(self) -> HostModel:
        """Return the model, and write down what it is."""
        host = load_host(self.folder, self.text, self.validation, self.accelerator, self.dtype)
        write_host_record(self.results, self.decides | facts(host))
        return host


def facts(host: HostModel) -> dict[str, Any]:
    """Return what a reader wants to know of a model, as JSON values."""
    architectures = host.folder.config.get("architectures") or [type(host.model).__name__]
    return {
        "source": host.folder.source,
        "architecture": str(architectures[0]),
        "model_type": host.folder.config["model_type"],
        "parameters": host.parameters,
        "active_parameters": host.active_parameters,
        "bytes_known": host.text.knows_bytes,
    }


def text_config(keys: Any) -> DataConfig:
    """Return the typed group `data` of a command that measures a model; `UserError` unless it is a source of text."""
    if not isinstance(keys, dict) or keys.get("source") is None:
        raise UserError(f"hf= needs the text to measure it on: give data=NAME, one of {', '.join(_with_text())}")
    own = DATA.get(keys["source"], DataConfig).model_fields
    for key, value in keys.items():
        if key not in own and value is not None:
            raise UserError(f"data.{key}= is not for data={keys['source']}: leave it out")
    data = checked_data({key: value for key, value in keys.items() if key in own})
    if data.source not in _with_text():
        raise UserError(f"data={data.source} has no text: hf= takes {', '.join(_with_text())}")
    return data


def held_out_text(data: DataConfig, tokenizer: HubTokenizer) -> Store:
    """Return the store of the validation split in the model's own tokens, prepared if it is not there yet."""
    return prepare(data.model_copy(update={"vocab_size": tokenizer.vocab_size}), progress=True, encoder=tokenizer)


def windows(store: Store, data: DataConfig, context: int) -> ValidationSplit:
    """Return the validation split in windows of `context` tokens; `UserError` if it does not fill one."""
    split = ValidationSplit.of(store, context, data.seed or 0, data.validation_document_tokens)
    if not len(split.whole):
        held = len(store.tokens("validation"))
        raise UserError(
            f"the validation split of data={data.source} holds {held:,} tokens, fewer than context={context}"
        )
    return split


def _with_text() -> list[str]:
    return [name for name in DATA if name != "synthetic"]

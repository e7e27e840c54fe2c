"""Loads a model of Hugging Face to be measured: `hf=` of evaluate.py, with its text and the folder of its results.

Nothing of the model's folder is executed: models come from the classes of transformers, weights from safetensors. They
go into memory, or where accelerate finds room.
"""

import gc
import logging
import os
import re
import tempfile
import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import file_digest
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simbal.analysis.result import require_same_model, write_model
from simbal.config.compose import checked_data
from simbal.config.schema import DATA, DataConfig
from simbal.config.values import check_name, one_of, whole_number
from simbal.data.loader import ValidationSplit
from simbal.data.prepare import prepare
from simbal.data.store import Store
from simbal.data.tokenizer import HubTokenizer, load_hub_tokenizer
from simbal.errors import UserError
from simbal.hf.convert import CONFIG, opened, read_json, weight_files
from simbal.hf.model import HFModel
from simbal.hf.routers import HFRouter, find_routers
from simbal.processes import release_freed_memory
from simbal.training.build import cpu_multiplies_bf16, resolve_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # the names of safetensors
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # files of a model on the hub
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
MOST_CONTEXT = 2048  # tokens of a window that nobody asked for
PATIENCE = 10  # seconds for the hub to answer
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # else threads of transformers read ahead until every weight is there twice
SPARE = 1.2  # of the bytes of the weights: for a pass beside them


@dataclass(frozen=True)
class HFFolder:
    """A model's folder on this machine; `source` is what the user has called it."""

    source: str
    path: Path

    @property
    def name(self) -> str:
        """The name of its results' folder, and of its arm in tables."""
        last = Path(self.source).name if HUB_NAME.fullmatch(self.source) else self.path.name
        return re.sub(r"[^A-Za-z0-9._-]+", "_", last).strip(".") or "model"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json(self.path / CONFIG)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many numbers of each kind the files hold, such as BF16; tied weights once."""
        counts: dict[str, int] = {}
        for file in weight_files(self.path):
            with opened(file) as tensors:
                for header in (tensors.get_slice(name) for name in tensors.keys()):  # noqa: SIM118  it is no dict
                    counts[header.get_dtype()] = counts.get(header.get_dtype(), 0) + prod(header.get_shape())
        return counts

    @property
    def dtype(self) -> str | None:
        """The dtype that most numbers are in; None if they are quantised."""
        return STORED.get(max(self.counts, key=lambda kind: self.counts[kind]))

    def window(self, asked: int | None) -> int:
        """Return the tokens of a window; `UserError` if more are asked for than the model takes."""
        longest = self.config.get("text_config", self.config).get("max_position_embeddings")
        if asked is not None and longest is not None and asked > longest:
            raise UserError(f"context={asked} is longer than {self.source} takes: max_position_embeddings={longest}")
        return asked or min(longest or MOST_CONTEXT, MOST_CONTEXT)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The sha256 of config.json, and one over those of all files of weights; all bytes are read."""
        config, *weights = (self._sha256(file) for file in (self.path / CONFIG, *weight_files(self.path)))
        return {"config": config, "weights": " ".join(weights)}

    def _sha256(self, file: Path) -> str:
        with file.open("rb") as content:
            return file_digest(content, "sha256").hexdigest()


def find_folder(hf: str) -> HFFolder:
    """Return the folder of the model that `hf=` names, fetched from the hub if it is a name of one there."""
    if Path(hf).is_dir():
        return HFFolder(hf, Path(hf).resolve())
    if not HUB_NAME.fullmatch(hf):
        raise UserError(f"hf={hf}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return HFFolder(hf, Path(snapshot_download(hf, allow_patterns=WANTED, etag_timeout=PATIENCE)))
    except Exception as error:  # of the network, of the hub, of a name that it does not know
        raise UserError(f"hf={hf} is no folder here, and the hub does not give it: {_one_line(error)}") from None


@dataclass(frozen=True)
class HFRequest:
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
    def folder(self) -> HFFolder:
        """The model's folder."""
        if find_spec("transformers") is None:
            raise UserError("hf= needs transformers: pip install 'simbal[hf]'")
        return find_folder(str(self.hf))

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
        """The validation split in the model's own tokens, prepared if it is not there yet."""
        data = self.config.model_copy(update={"vocab_size": self.text.vocab_size})
        return prepare(data, progress=True, encoder=self.text)

    @cached_property
    def validation(self) -> ValidationSplit:
        """Its windows; `UserError` if it does not fill one."""
        context, data = self.folder.window(self.context), self.config
        split = ValidationSplit.of(self.store, context, data.seed or 0, data.validation_document_tokens)
        if not len(split.included):
            held = len(self.store.tokens("validation"))
            raise UserError(
                f"the validation split of data={data.source} holds {held:,} tokens, fewer than context={context}"
            )
        return split

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""
        return resolve_device(self.accelerator)

    @cached_property
    def compute_dtype(self) -> str:
        """The dtype of the weights in memory, in which the model is computed.

        `auto` is the files' own; on a CPU without instructions for bf16, where it is 100 times slower, fp32.
        """
        if self.dtype != "auto":
            return str(self.dtype)
        stored = self.folder.dtype or "bfloat16"  # quantised weights are turned into that
        slow = self.device.type == "cpu" and stored != "float32" and not cpu_multiplies_bf16()
        return "float32" if slow or stored == "float64" else stored

    @cached_property
    def decides(self) -> dict[str, Any]:
        """All that decides the numbers beside the keys of an analysis."""
        return {
            "digests": self.folder.digests,
            "tokenizer": self.text.table_sha256,
            "context": int(self.validation.windows_WT.shape[1]) - 1,
            "dtype": self.compute_dtype,
            "data": {"source": self.config.source, **self.store.fingerprints},
            "document_tokens": self.validation.document_tokens,
            "seed": self.validation.seed,
        }

    def require_results(self) -> Path:
        """Return the folder of results; `UserError` if another model or text was measured there."""
        require_same_model(self.results, self.decides)
        return self.results

    def load(self) -> HFModel:
        """Return the model, and write down what it is.

        Raises:
            UserError: transformers does not know it, weights are missing, or the tokenizer does not fit.
        """
        folder, text = self.folder, self.text
        needed = sum(folder.counts.values()) * DTYPES[self.compute_dtype].itemsize
        _silence_transformers()
        os.environ.setdefault(ONE_BY_ONE, "1")
        if find_spec("accelerate") is None or needed * SPARE <= _free_memory(self.device):
            module = _load(folder, self.compute_dtype).to(self.device)
            routers = _routers(module)
        else:
            module, routers = _load_offloaded(folder, self.compute_dtype, self.device)
        gc.collect()
        release_freed_memory()
        ids = len(module.get_input_embeddings().weight)  # type: ignore[operator]
        if ids < text.vocab_size:
            raise UserError(f"the tokenizer in {folder.path} has {text.vocab_size:,} ids, and the model {ids:,}")
        precisions = {"trained": folder.dtype or "quantised", "analysed": self.compute_dtype}
        model = HFModel(folder.path, module, routers, text, self.validation, self.device, precisions)
        facts = {
            "source": folder.source,
            "architecture": (folder.config.get("architectures") or [type(module).__name__])[0],
            "model_type": folder.config["model_type"],
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "bytes_known": text.knows_bytes,
        }
        write_model(self.results, self.decides | facts)
        return model


def text_config(keys: Any) -> DataConfig:
    """Return the typed group `data` of a command that measures a model; `UserError` unless it is a source of text."""
    sources = [name for name in DATA if name != "synthetic"]
    source = keys.get("source") if isinstance(keys, dict) else None
    if source not in sources:
        raise UserError(
            f"hf= needs the text to measure it on (got data={source}): give data= one of {', '.join(sources)}"
        )
    own = DATA[source].model_fields
    for key, value in keys.items():
        if key not in own and value is not None:
            raise UserError(f"data.{key}= is not for data={source}: leave it out")
    return checked_data({key: value for key, value in keys.items() if key in own})


def _load(folder: HFFolder, dtype: str, **where: Any) -> nn.Module:
    """Return the model with all its weights; `UserError` if one is missing or has another shape."""
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    try:
        model, found = library.from_pretrained(
            folder.path, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, experts_implementation="eager", **where,
        )  # fmt: skip
    except Exception as error:  # what is wrong with somebody's config or weights has many types
        raise UserError(f"{folder.source} is no model that transformers loads: {_one_line(error)}") from None
    if absent := [*found["missing_keys"], *found["mismatched_keys"]]:
        raise UserError(f"{folder.source} lacks weights of its own config, or has others: {min(map(str, absent))}")
    whole: nn.Module = model.eval()
    return whole


def _routers(model: nn.Module) -> list[HFRouter] | UserError:
    """Return the routers; none of a dense model; what is wrong with those of a mixture that is not known."""
    try:
        return find_routers(model)
    except UserError as error:
        names = [type(module).__name__.lower() for module in model.modules()]
        mixed = any("expert" in name or "moe" in name for name in names)
        return error if mixed or any("expert" in name for name, _ in model.named_parameters()) else []


def _load_offloaded(folder: HFFolder, dtype: str, device: torch.device) -> tuple[nn.Module, list[HFRouter] | UserError]:
    """Return the model with its weights where there is room: on the device, in memory, else on the disk.

    What a router does is found in a copy without weights, as those of the model come and go.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    places: dict[int | str, int] = {"cpu": int(_free_memory(torch.device("cpu")) * 0.6)}  # a pass needs the rest
    if device.type == "cuda":
        places = {0: int(_free_memory(device) * 0.8), **places}
    disk = tempfile.TemporaryDirectory(prefix="simbal-offload-")
    model = _load(folder, dtype, device_map="auto", offload_folder=disk.name, max_memory=places)
    weakref.finalize(model, disk.cleanup)
    library: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        hollow: nn.Module = library.from_config(config, trust_remote_code=False)
    found = _routers(hollow)
    return model, found if isinstance(found, UserError) else [_in_model(router, hollow, model) for router in found]


def _in_model(router: HFRouter, hollow: nn.Module, model: nn.Module) -> HFRouter:
    """Return a router that was found in a copy of the model, in the model itself."""
    names = {module: name for name, module in hollow.named_modules()}
    module, experts = (model.get_submodule(names[part]) for part in (router.module, router.experts))
    bias_at = router.bias_at and (model.get_submodule(names[router.bias_at[0]]), router.bias_at[1])
    return replace(router, module=module, experts=experts, bias_at=bias_at)


def _free_memory(device: torch.device) -> int:
    from accelerate.utils import get_max_memory

    return int(get_max_memory()["cpu" if device.type == "cpu" else 0])


def _silence_transformers() -> None:
    """Let transformers print no progress and no advice; what goes wrong is raised all the same."""
    import transformers

    theirs: Any = transformers.utils.logging
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

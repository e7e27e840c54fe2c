"""Load a Hugging Face model for `evaluate.py hf=`, and the text to measure it on.

Code in the model's folder is never executed: classes come from transformers and weights from safetensors. accelerate
offloads a model that does not fit into memory.
"""

import atexit
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simbal.analysis.result import require_same_model, write_model
from simbal.config.compose import validate_data
from simbal.config.schema import DATA, DataConfig
from simbal.config.values import check_choice, check_integer, check_name
from simbal.data.loader import ValidationSplit
from simbal.data.prepare import prepare
from simbal.data.store import Store, hash_file
from simbal.data.tokenizer import HubTokenizer, load_hub_tokenizer
from simbal.errors import UserError
from simbal.hf.convert import CONFIG, on_one_line, read_config, require_transformers, weight_files
from simbal.hf.model import HFModel
from simbal.hf.routers import HFRouter, find_routers
from simbal.training.build import cpu_multiplies_bf16, resolve_device

ADAPTER = "adapter_config.json"  # with this file, transformers applies an adapter without notice
BACKENDS = ("eager", "batched_mm", "grouped_mm")  # of transformers, for experts
DTYPES = ("auto", "float32", "bfloat16", "float16")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DEFAULT_CONTEXT = 2048  # longest default window, in tokens
MEMORY_FRACTION = 0.8  # of free memory for weights; the rest is for the forward pass


@dataclass(frozen=True)
class HFRequest:
    """The keys of a command that measures a Hugging Face model.

    Args:
        hf: folder, or name on the Hugging Face Hub.
        name: results go to `output_dir`/`name`/<model>.
        context: window length in tokens; None: the model's maximum, at most 2,048.
        dtype: auto, float32, bfloat16 or float16.
        data: the config group `data`, with a source of text.
        accelerator: auto, cpu or cuda.
        output_dir: folder of all results.

    Raises:
        UserError: a key has an invalid value.
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
        check_choice("dtype", self.dtype, DTYPES)
        if self.context is not None:
            check_integer("context", self.context, 1)

    @cached_property
    def path(self) -> Path:
        """The model's folder, downloaded from the Hub if `hf` is a name there."""
        require_transformers()
        folder = find_folder(str(self.hf))
        if (folder / ADAPTER).exists():
            raise UserError(f"{folder} has an {ADAPTER}: merge the adapter into the weights, or remove this file")
        return folder

    @property
    def results(self) -> Path:
        """The folder with model.json and the folder `analysis`."""
        model = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(str(self.hf)).resolve().name).strip(".")
        return Path(self.output_dir, self.name, model or "model")

    @cached_property
    def config(self) -> Any:
        """The model's transformers config."""
        return read_config(self.path)

    @cached_property
    def data_config(self) -> DataConfig:
        """The validated group `data`; `UserError` unless its source is text."""
        sources = [name for name in DATA if name != "synthetic"]
        source = self.data.get("source") if isinstance(self.data, dict) else None
        if source not in sources:
            raise UserError(f"hf= needs a text to measure the model on: data={'|'.join(sources)} (got data={source})")
        known = DATA[source].model_fields
        return validate_data({key: value for key, value in self.data.items() if key in known or value is not None})

    @cached_property
    def text(self) -> HubTokenizer:
        """The model's tokenizer."""
        return load_hub_tokenizer(self.path)

    @cached_property
    def store(self) -> Store:
        """The validation split, tokenized by the model's tokenizer, prepared on first use."""
        data = self.data_config.model_copy(update={"vocab_size": self.text.vocab_size})
        return prepare(data, progress=True, encoder=self.text)

    @cached_property
    def validation(self) -> ValidationSplit:
        """The windows of the validation split."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if self.context is not None and longest is not None and self.context > longest:
            raise UserError(f"context={self.context} is longer than the model's max_position_embeddings={longest}")
        context, data = self.context or min(longest or DEFAULT_CONTEXT, DEFAULT_CONTEXT), self.data_config
        split = ValidationSplit.of(self.store, context, data.seed or 0, data.validation_document_tokens)
        if not len(split.included):
            count = len(self.store.tokens("validation"))
            raise UserError(f"data={data.source} has only {count:,} validation tokens, fewer than context={context}")
        return split

    @property
    def device(self) -> torch.device:
        """The device of the first layer."""
        return resolve_device(self.accelerator)

    @property
    def stored_dtype(self) -> str:
        """The dtype of the weights in the files, according to the config."""
        return str(self.config.dtype or torch.float32).removeprefix("torch.")

    @property
    def compute_dtype(self) -> str:
        """The dtype of weights and activations. `auto` keeps the stored dtype, unless the CPU emulates bf16."""
        if self.dtype != "auto":
            return str(self.dtype)
        is_emulated = self.device.type == "cpu" and not cpu_multiplies_bf16()
        return "float32" if is_emulated else self.stored_dtype

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the numbers of an analysis, except its keys."""
        config, *weights = (hash_file(file) for file in (self.path / CONFIG, *weight_files(self.path)))
        return {
            "digests": {"config": config, "weights": " ".join(weights)},
            "tokenizer": self.text.table_sha256,
            "context": self.validation.seq_len,
            "dtype": self.compute_dtype,
            "data": {"source": self.data_config.source, **self.store.fingerprints},
            "document_tokens": self.validation.document_tokens,
            "seed": self.validation.seed,
        }

    def require_results(self) -> Path:
        """Return the folder of results; `UserError` if it contains results of another model or text."""
        require_same_model(self.results, self.identity)
        return self.results

    def load(self) -> HFModel:
        """Load the model and write model.json.

        Raises:
            UserError: transformers does not know the architecture, weights are missing, or the tokenizer does not fit.
        """
        subject = self._build("eager", self.validation)
        parameters, routers = num_parameters(subject.model), subject.known_routers
        unused = 1 - routers[0].top_k / len(routers[0].weight_ED) if routers else 0  # share of a layer's experts
        experts = (part for name, part in subject.model.named_modules() if name.endswith(".experts"))
        facts = {
            "source": str(self.hf),
            "architecture": (self.config.architectures or [type(subject.model).__name__])[0],
            "model_type": self.config.model_type,
            "parameters": parameters,
            "active_parameters": parameters - round(unused * sum(map(num_parameters, experts))),
            "bytes_known": self.text.knows_bytes,
        }
        write_model(self.results, self.identity | facts)
        return subject

    def _build(self, backend: str, validation: ValidationSplit) -> HFModel:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity(logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        module = load_module(self.path, getattr(torch, self.compute_dtype), self.device, backend)
        routers, router_error = find_known_routers(module)
        embedding_rows = len(module.get_input_embeddings().weight)  # type: ignore[operator]
        if embedding_rows < self.text.vocab_size:
            raise UserError(f"{self.path}: {self.text.vocab_size:,} token ids, but only {embedding_rows:,} embeddings")
        is_quantized = getattr(self.config, "quantization_config", None) is not None
        return HFModel(
            self.path, module, routers, router_error, self.text, validation, self.device,
            {"trained": "quantized" if is_quantized else self.stored_dtype, "analyzed": self.compute_dtype},
            f"transformers, {backend}", self.variant,
        )  # fmt: skip

    def variant(self, against: str | None, dtype: str | None, backend: str | None) -> HFModel:
        """Load this model again, or the one at `against` with the same tokenizer; see `Subject.variant`."""
        check_choice("backend", backend or "eager", BACKENDS)
        other = replace(self, hf=against or self.hf, dtype=dtype or self.compute_dtype)
        if other.text.table_sha256 != self.text.table_sha256:
            raise UserError(f"against={against} has a different tokenizer than {self.path}")
        return other._build(backend or "eager", self.validation)


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters; tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def find_folder(hf: str) -> Path:
    """Return the model's folder, downloaded from the Hub unless `hf` is a local folder."""
    if Path(hf).is_dir():
        return Path(hf).resolve()
    if not HUB_NAME.fullmatch(hf):
        raise UserError(f"hf={hf}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hf, allow_patterns=HUB_FILES))
    except Exception as error:  # network errors, Hub errors, unknown names
        raise UserError(f"hf={hf} is not a local folder and cannot be downloaded: {on_one_line(error)}") from None


def load_module(path: Path, dtype: torch.dtype, device: torch.device, backend: str = "eager") -> nn.Module:
    """Load a causal language model in evaluation mode.

    accelerate offloads weights that do not fit into memory: from the device to the CPU, then to disk.

    Raises:
        UserError: transformers cannot load the model, or a weight is missing or has the wrong shape.
    """
    from transformers import AutoModelForCausalLM

    # otherwise loader threads read ahead and double the memory for the weights
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    disk = tempfile.mkdtemp(prefix="simbal-offload-")
    atexit.register(shutil.rmtree, disk)
    devices = {"cpu"} if device.type == "cpu" else {0, "cpu"}
    library: Any = AutoModelForCausalLM
    config = read_config(path)
    config._attn_implementation = None  # a folder may name one that is downloaded and executed
    try:
        from accelerate.utils import get_max_memory

        memory = {place: int(size * MEMORY_FRACTION) for place, size in get_max_memory().items() if place in devices}
        model, loading = library.from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, experts_implementation=backend, device_map="auto", offload_folder=disk,
            max_memory=memory,
        )  # fmt: skip
    except Exception as error:  # transformers raises errors of many types
        raise UserError(f"transformers cannot load {path}: {on_one_line(error)}") from None
    if wrong := [*loading["missing_keys"], *loading["mismatched_keys"]]:
        raise UserError(f"weights in {path} are missing or have the wrong shape: {min(map(str, wrong))}")
    module: nn.Module = model.eval()
    return module


def find_known_routers(model: nn.Module) -> tuple[list[HFRouter], UserError | None]:
    """Return the routers, or the error if the model seems to have unknown routers. A dense model has neither."""
    try:
        return find_routers(model), None
    except UserError as error:
        names = [type(module).__name__.lower() for module in model.modules()]
        names += [name for name, _ in model.named_parameters()]
        return [], error if any("expert" in name or "moe" in name for name in names) else None

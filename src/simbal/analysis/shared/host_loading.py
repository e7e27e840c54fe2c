"""Loads the weights of a host model by transformers: into memory, or by accelerate to where there is room."""

import gc
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from simbal.analysis.shared.host_folder import HostFolder
from simbal.analysis.shared.host_model import HostModel
from simbal.data.hub_tokenizer import HubTokenizer
from simbal.data.loader import ValidationSplit
from simbal.errors import UserError
from simbal.host.routers import HostRouter, find_backbone, find_routers
from simbal.processes.heap import give_back_freed_memory
from simbal.training.build import cpu_multiplies_bf16, resolve_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INSTALL = "pip install 'simbal[hf]'"
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # a variable of transformers
SPARE = 1.2  # of the bytes of the weights: for a pass beside them


def compute_dtype(folder: HostFolder, asked: str, device: torch.device) -> str:
    """Return the dtype of the weights in memory, in which the model is computed.

    `auto` is that of the files; on a CPU without instructions for bf16, where it is 100 times slower, fp32.
    """
    if asked != "auto":
        return asked
    stored = folder.dtype or "bfloat16"  # quantised weights are turned into that
    if stored == "float64":
        return "float32"
    return "float32" if device.type == "cpu" and stored != "float32" and not cpu_multiplies_bf16() else stored


def load_host(
    folder: HostFolder, text: HubTokenizer, validation: ValidationSplit, accelerator: str, dtype: str
) -> HostModel:
    """Return the model in a folder, ready to be measured; no code of the folder is executed.

    Args:
        folder: of the model.
        text: its tokenizer.
        validation: the windows of a text in its tokens.
        accelerator: auto, cpu or cuda.
        dtype: auto, float32, bfloat16 or float16.

    Raises:
        UserError: transformers does not know it, weights are missing, or there is no room for it.
    """
    device = resolve_device(accelerator)
    computed = compute_dtype(folder, dtype, device)
    needed = folder.parameters * DTYPES[computed].itemsize
    with _quiet(), _one_by_one():
        if find_spec("accelerate") is None or needed * SPARE <= _free_memory(device):
            model = _loaded(folder, computed).to(device)
            routers = _routers(model)
        else:
            model, routers = _offloaded(folder, computed, device)
    if (ids := _ids(model)) < text.vocab_size:
        raise UserError(f"the tokenizer in {folder.path} has {text.vocab_size:,} ids, and the model {ids:,}")
    known = [] if isinstance(routers, UserError) else routers
    backbone = find_backbone(model, known) if known else None
    return HostModel(folder, model, routers, text, validation, backbone, device, computed)


def _loaded(folder: HostFolder, dtype: str, **where: Any) -> nn.Module:
    """Return the model with all its weights; `UserError` if one is missing or has another shape."""
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    try:
        model, found = library.from_pretrained(
            folder.path, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, experts_implementation="eager", **where,
        )  # fmt: skip
    except Exception as error:  # what is wrong with somebody's config or weights has many types
        raise UserError(f"{folder.source} is no model that transformers loads: {_said(error)}") from None
    absent = sorted(found["missing_keys"]) or sorted(str(key) for key in found["mismatched_keys"])
    if absent:
        raise UserError(f"{folder.source} lacks weights of its own config, or has others: {absent[0]}")
    whole: nn.Module = model.eval()
    return whole


def _routers(model: nn.Module) -> list[HostRouter] | UserError:
    """Return the routers; none of a dense model; what is wrong with those of a mixture that is not known."""
    try:
        return find_routers(model)
    except UserError as error:
        names = [type(module).__name__.lower() for module in model.modules()]
        mixed = any("expert" in name or "moe" in name for name in names)
        return error if mixed or any("expert" in name for name, _ in model.named_parameters()) else []


def _offloaded(folder: HostFolder, dtype: str, device: torch.device) -> tuple[nn.Module, list[HostRouter] | UserError]:
    """Return the model with its weights where there is room: on the device, in memory, else on the disk.

    What a router does is found in a copy without weights, as those of the model come and go.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    disk = tempfile.TemporaryDirectory(prefix="simbal-offload-")
    model = _loaded(folder, dtype, device_map="auto", offload_folder=disk.name, max_memory=_shares(device))
    weakref.finalize(model, disk.cleanup)
    config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        hollow: nn.Module = library.from_config(config, trust_remote_code=False)
    found = _routers(hollow)
    return model, found if isinstance(found, UserError) else [_moved(router, hollow, model) for router in found]


@dataclass(frozen=True)
class OffloadedRouter(HostRouter):
    """A router whose weight and bias may be on the disk, from where they are read."""

    @property
    def weight_ED(self) -> Tensor:
        """The router's weight, (E, D)."""
        folder, _, name = self.weight_name.rpartition(".")
        return _read(self.module.get_submodule(folder), name)

    @property
    def bias(self) -> Tensor | None:
        """The bias on the choice, of E elements."""
        return None if self.bias_at is None else _read(*self.bias_at)


def _moved(router: HostRouter, hollow: nn.Module, model: nn.Module) -> HostRouter:
    """Return a router that was found in a copy of the model, in the model itself."""
    names = {module: name for name, module in hollow.named_modules()}
    known = {field.name: getattr(router, field.name) for field in fields(router)}
    known |= {part: model.get_submodule(names[known[part]]) for part in ("module", "experts")}
    if router.bias_at is not None:
        owner, name = router.bias_at
        known["bias_at"] = model.get_submodule(names[owner]), name
    return OffloadedRouter(**known)


def _read(owner: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a module, from where accelerate keeps it."""
    tensor: Tensor = getattr(owner, name)
    if not tensor.is_meta:
        return tensor
    hook: Any = owner._hf_hook
    kept: Tensor = hook.weights_map[name]
    return kept


def _shares(device: torch.device) -> dict[int | str, int]:
    """Return the bytes that weights may take, by place; a pass needs the rest."""
    places: dict[int | str, int] = {"cpu": int(_free_memory(torch.device("cpu")) * 0.6)}
    return places if device.type == "cpu" else {0: int(_free_memory(device) * 0.8), **places}


def _free_memory(device: torch.device) -> int:
    from accelerate.utils import get_max_memory

    return int(get_max_memory()["cpu" if device.type == "cpu" else 0])


def _ids(model: nn.Module) -> int:
    """Return how many ids the model's input embedding has."""
    return len(model.get_input_embeddings().weight)  # type: ignore[operator]


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def require_transformers() -> None:
    """Raise `UserError` unless transformers is installed."""
    if find_spec("transformers") is None:
        raise UserError(f"hf= needs transformers: {INSTALL}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers print no progress and no advice within the block; what goes wrong is raised all the same."""
    import transformers

    theirs: Any = transformers.utils.logging
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Let transformers read one weight after the other within the block, and give back what that has held.

    Its threads read ahead until every weight is there twice.
    """
    before = os.environ.get(ONE_BY_ONE)
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        del os.environ[ONE_BY_ONE]
        if before is not None:
            os.environ[ONE_BY_ONE] = before
        gc.collect()
        give_back_freed_memory()

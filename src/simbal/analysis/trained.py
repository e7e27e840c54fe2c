"""A finished run, loaded for analysis: its config, record, data, and model with the final weights.

Shapes: B sequences, S sequence length, T = S + 1, N tokens, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from simbal.analysis.generate import cached_decoder
from simbal.analysis.pruning import pruned
from simbal.analysis.subject import NotApplicableError, Predicted, Pruned, Subject
from simbal.config.schema import DataConfig, Group
from simbal.config.values import check_choice
from simbal.cost import parameters
from simbal.data.loader import ValidationSplit
from simbal.data.prepare import prepare
from simbal.data.store import Store, find
from simbal.data.tokenizer import Tokenizer, load_tokenizer
from simbal.errors import UserError
from simbal.model.expert_similarity import ExpertSimilarity, record_similarity
from simbal.model.head import head_loss
from simbal.model.router import Router, Steering
from simbal.runs.folder import RunFolder, is_run, runs_in
from simbal.runs.spec import RunSpec
from simbal.training.build import build_module, resolve_device, resolve_precision
from simbal.training.checkpoint import FINAL, DamagedCheckpointError, read
from simbal.training.module import LitMoE

TEXT_KEY = {"files": "files", "dclm": "location"}  # the key that holds the location of a source's text
DTYPES = {"float32": "32-true", "bfloat16": "bf16-mixed"}
SAME_SHAPE = ("num_layers", "d_model", "num_experts", "top_k")  # keys of `model`


class DataPlaces(Group):
    """Data locations that the user sets, or None. They override the locations in a run's config."""

    cache_dir: str | None = None
    tokenizer_path: str | None = None
    files: Any = None
    validation_files: Any = None
    location: str | None = None


NOWHERE = DataPlaces()


class TrainedRun(Subject):
    """A finished run, with its model in evaluation mode."""

    reads: ClassVar[str] = "the run was trained on"
    precision_note: ClassVar[str] = "The run was trained in {trained} and is analyzed in {analyzed}."

    def __init__(
        self, path: Path, spec: RunSpec, record: dict[str, Any], store: Store, module: LitMoE, places: DataPlaces
    ) -> None:
        """Wrap a run whose weights are loaded into `module`, which is on the device of the analyses."""
        self.path, self.spec, self.record, self.store, self.places = path, spec, record, store, places
        self.module, self.model, self.balancing = module, module.model, module.balancing
        self.device, self.backend = module.device, self.model.backend
        self.bytes_of_token_V = module.bytes_of_token_V
        self.precisions = {"trained": record["precision"], "analyzed": resolve_precision("auto", self.device)}
        data = spec.config.data
        self.validation = ValidationSplit.of(
            store, data.seq_len, spec.config.data_seed, data.validation_document_tokens
        )
        self.ragged = self.balancing.ragged

    @property
    def choosable(self) -> int:
        """The number of experts that a token can choose from."""
        choosers = (self.balancing.parts[name] for name in self.balancing.choosers)
        return min((part.choosable(self.num_experts, self.top_k) for part in choosers), default=self.num_experts)

    @property
    def steering(self) -> Steering:
        """The strategies that the run was trained with."""
        return self.balancing

    @property
    def routers(self) -> list[Router]:
        """The router of each MoE layer; empty for a dense model."""
        return [*self.model.routers]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradients and use the precision of the device within the block."""
        mixed = self.precisions["analyzed"] == "bf16-mixed"
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext():
            yield

    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Yield the model's predictions for each batch; `steering`, if given, replaces the strategies."""
        for windows_BT, documents_BS in self.batches(batch_size, tokens):
            with self.inference():
                hidden_BSD, routings = self.model(windows_BT[:, :-1], steering or self.steering)
                targets_BS = windows_BT[:, 1:]
                hidden_ND, kernels = hidden_BSD.flatten(0, 1), self.model.kernels
                loss = head_loss(hidden_ND, self.model.head_VD, targets_BS.flatten(), 0.0, kernels)
            yield Predicted(windows_BT, documents_BS, loss.nll_N.view_as(targets_BS), routings)

    @contextmanager
    def inputs(self) -> Iterator[list[Tensor]]:
        """Yield a list with the last input (N, D) of each MoE layer, filled by each forward pass in the block."""
        inputs = [torch.empty(0)] * len(self.routers)

        def keep_input(layer: int, _: Router, args: tuple[Tensor, ...]) -> None:
            inputs[layer] = args[0]

        with ExitStack() as hooks:
            for layer, router in enumerate(self.routers):
                hooks.enter_context(router.register_forward_pre_hook(partial(keep_input, layer)))
            yield inputs

    def similarity(self) -> AbstractContextManager[ExpertSimilarity]:
        """Return a context manager that measures expert similarity in each forward pass."""
        return record_similarity(self.model.feed_forwards)

    def pruned(self, pruning: Pruned) -> AbstractContextManager[list[int]]:
        """Return a context manager that prunes experts and yields the (token, expert) pairs computed by each layer."""
        return pruned(self.model.feed_forwards, pruning)

    def variant(self, against: str | None, dtype: str | None = None, backend: str | None = None) -> "TrainedRun":
        """Load the run again, or another run or its weights; see `Subject.variant`."""
        precision = DTYPES[check_choice("dtype", dtype, [*DTYPES])] if dtype else self.precisions["analyzed"]
        other = load(Path(against or self.path), self.device.type, self.places, precision, backend or "")
        theirs = other.facts()
        for key, value in self.facts().items():
            if theirs[key] != value:
                raise UserError(f"against={against} has {key}={theirs[key]}, {self.path} has {value}")
        other.validation = self.validation  # the same windows, even if the data.seed of the runs differs
        return other

    def facts(self) -> dict[str, Any]:
        """Return what two runs must share to be compared token by token."""
        shape = {f"model.{key}": getattr(self.spec.config.model, key) for key in SAME_SHAPE}
        return {"data.seq_len": self.seq_len, **shape, "tokens": self.store.fingerprints["tokens"][:12]}

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; `UserError` for a run on data=synthetic."""
        data = self.spec.config.data
        if data.source == "synthetic":
            raise UserError(f"{self.path} was trained on data=synthetic, which has no text")
        return load_tokenizer(data.vocab_size, self.places.tokenizer_path)

    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that takes the next ids (B, Q) and returns the logits (B, V) after the last of them."""
        return cached_decoder(self.model, self.steering)

    def every_expert_flops(self) -> float:
        """Return the FLOPs of a forward pass that also computes all experts, as a multiple of a plain forward pass."""
        shape = self.model.shape
        expert_weights = 3 * shape.d_model * shape.d_expert * shape.num_experts * shape.num_layers
        return 1 + 2 * expert_weights / parameters(shape).forward_flops(self.seq_len)


def load(
    path: Path, accelerator: str = "auto", places: DataPlaces = NOWHERE, precision: str = "auto", backend: str = ""
) -> TrainedRun:
    """Load a finished run. Checkpoints are read as weights only, so nothing in the folder is executed.

    Args:
        path: the run's folder, or a file in its folder `checkpoints`.
        accelerator: auto, cpu or cuda.
        places: locations of the data.
        precision: auto, 32-true or bf16-mixed.
        backend: backend of the experts; empty: the run's.

    Raises:
        UserError: the run is not finished, its data are missing, the backend cannot run, or the checkpoint is damaged
            or from another run.
    """
    checkpoint = path / "checkpoints" / FINAL
    if path.suffix == ".ckpt":
        path, checkpoint = path.parent.parent, path
    spec, record = read_finished_run(path)
    device = resolve_device(accelerator)
    store = find_store(path, spec.config.data, record["data"]["tokens"], places)
    precision = resolve_precision(precision, device, force=True)
    experts = spec.config.experts.model_copy(update={"backend": backend} if backend else {})
    built = replace(spec, config=spec.config.model_copy(update={"experts": experts}))
    module = build_module(built, store, device, precision)
    module.load_state_dict(read_weights(checkpoint, spec.hash))
    run = TrainedRun(path, spec, record, store, module.eval().to(device), places)
    run.precisions["analyzed"] = precision
    return run


def find_store(path: Path, data: DataConfig, tokens: str, places: DataPlaces) -> Store:
    """Find the tokens that a run was trained on, by their fingerprint, in the user's or the run's cache.

    If neither cache has them, prepare them from the user's text.

    Args:
        path: the run's folder.
        data: the data config of the run.
        tokens: fingerprint of the tokens, from the run's record.
        places: locations that the user sets.

    Raises:
        UserError: the tokens are missing, or the user's text has different tokens.
    """
    for folder, remember in ((places.cache_dir, True), (data.cache_dir, False)):
        if folder is not None and (store := find(Path(folder), tokens, remember)):
            return store
    key = TEXT_KEY.get(data.source)
    if places.cache_dir is None or key is None or getattr(places, key) is None:
        searched = " or ".join(dict.fromkeys(str(place) for place in (places.cache_dir, data.cache_dir) if place))
        text = f" data.{key}=..." if key else ""
        raise UserError(
            f"the data of {path} (data={data.source}, tokens {tokens[:12]}) are not in {searched}: run "
            f"`python prepare.py data={data.source} data.vocab_size={data.vocab_size}{text}`, or set data.cache_dir="
            f"{f' or data.{key}=' if key else ''}"
        )
    inputs = {name: getattr(places, name) for name in ("files", "validation_files", "location") if hasattr(data, name)}
    local = {"cache_dir": places.cache_dir, "tokenizer_path": places.tokenizer_path, "threads": None}
    store = prepare(data.model_copy(update=local | inputs), progress=True)
    if store.fingerprints["tokens"] != tokens:
        raise UserError(
            f"data.{key}= is not the text that {path} was trained on (tokens {store.fingerprints['tokens'][:12]} "
            f"instead of {tokens[:12]})"
        )
    return store


def read_finished_run(path: Path) -> tuple[RunSpec, dict[str, Any]]:
    """Return the config and the record of a run; `UserError` unless the run is finished."""
    folder = RunFolder(path)
    if not is_run(path):
        raise UserError(f"{path} is not a run: use outputs/<name>/<run>, or outputs/<name> for all runs in it")
    spec, record = folder.read_spec(), folder.read_record()
    if record is None or record["status"] != "finished" or record["config_hash"] != spec.hash:
        raise UserError(f"{path} is not finished: rerun the command that started it")
    return spec, record


def read_weights(file: Path, config_hash: str) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint.

    Raises:
        NotApplicableError: the file does not exist.
        UserError: the file is damaged, or belongs to another config.
    """
    try:
        saved = read(file)
    except FileNotFoundError:
        raise NotApplicableError(f"{file} does not exist") from None
    except DamagedCheckpointError as error:
        raise UserError(f"{file} is damaged or not a checkpoint of simbal ({error})") from None
    if saved["config_hash"] != config_hash:
        raise UserError(f"{file} was not saved by the run in this folder")
    return dict(saved["state_dict"])


def find_runs(path: Path) -> list[Path]:
    """Return the folders of a run or of all finished runs of outputs/<name>; `UserError` if there are none."""
    if is_run(path):
        return [path]
    if not path.is_dir():
        raise UserError(f"folder {path} does not exist: set run=outputs/<name>/<run>, or run=outputs/<name>")
    finished = [run for run in runs_in(path) if (RunFolder(run).valid_record() or {}).get("status") == "finished"]
    if not finished:
        raise UserError(f"{path} contains no finished run")
    return finished

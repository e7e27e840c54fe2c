"""A finished run, read back: its config, its record, its data and its model with the final weights.

Shapes: B sequences, S sequence length, T = S + 1, W windows, D model width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from simbal.analysis.generate import decoder_of
from simbal.analysis.pruning import pruned
from simbal.analysis.subject import Predicted, Pruned, Subject, UnsuitedError
from simbal.balancing.bias import BiasController
from simbal.config.compose import typed
from simbal.config.schema import DataConfig, Group
from simbal.cost.parameters import parameters
from simbal.data.loader import ValidationSplit
from simbal.data.store import Store, find, prepare
from simbal.data.tokenizer import Tokenizer, load_tokenizer
from simbal.errors import UserError
from simbal.model.expert_similarity import ExpertSimilarity, record_similarity
from simbal.model.head import head_loss
from simbal.model.moe import MoELayer
from simbal.model.router import Groups, Router, Steering
from simbal.model.transformer import Transformer
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.build import build_module, resolve_device, resolve_precision
from simbal.training.checkpoint import DamagedCheckpointError, read
from simbal.training.module import LitMoE

INPUT = {"files": "files", "dclm": "location"}  # the key of a source that says where its text is
FINAL = "final.ckpt"


class DataPlaces(Group):
    """The places where the user says that data are; None: the user does not."""

    cache_dir: str | None = None
    tokenizer_path: str | None = None
    files: Any = None
    validation_files: Any = None
    location: str | None = None

    @classmethod
    def of(cls, keys: Any) -> "DataPlaces":
        """Return the places that the keys `data` of a command line give; `UserError` for a key of another kind."""
        return typed(cls, keys, "data.")


NOWHERE = DataPlaces()


@dataclass(frozen=True)
class TrainedRun(Subject):
    """A run for analyses to work on; its model is in evaluation mode."""

    path: Path
    spec: RunSpec
    record: dict[str, Any]
    store: Store
    module: LitMoE
    validation: ValidationSplit
    device: torch.device
    precision: str
    places: DataPlaces  # the user's; those in the run's own config are not followed
    reads: ClassVar[str] = "the run was trained on"
    precision_note: ClassVar[str] = "The run was trained in {trained} and is analysed in {analysed}."

    @property
    def model(self) -> Transformer:
        """The transformer alone."""
        return self.module.model

    @property
    def precisions(self) -> dict[str, str]:
        """The precision that the run was `trained` in, and that in which it is `analysed` on this device."""
        return {"trained": self.record["precision"], "analysed": self.precision}

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.spec.config.data.seq_len

    @property
    def bytes_of_token_V(self) -> Tensor:
        """UTF-8 bytes that each id stands for."""
        return self.module.bytes_of_token_V

    @property
    def steering(self) -> Steering:
        """The strategies that it was trained with."""
        return self.module.balancing

    @property
    def ragged(self) -> bool:
        """Whether a token may have more or fewer experts than K."""
        return self.steering.ragged

    @property
    def groups(self) -> Groups | None:
        """The groups of experts that limit a token's choice, or None."""
        chooser = self.module.balancing.parts.get(self.module.balancing.chooser or "")
        return chooser.groups if isinstance(chooser, BiasController) else None

    @property
    def backend(self) -> str | None:
        """The implementation of its experts."""
        return self.model.backend

    @property
    def routers(self) -> list[Router]:
        """The router of every MoE layer, first layer first."""
        return [*self.model.routers]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Compute without gradients within the block, in the precision of the device."""
        mixed = self.precision == "bf16-mixed"
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext():
            yield

    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Yield the model's predictions for each batch.

        Routers choose as the run's strategies say, or as `steering` does.
        """
        steering = steering or self.module.balancing
        for windows_BT, documents_BS in self.batches(batch_size, tokens):
            with self.inference():
                hidden_BSD, routings = self.model(windows_BT[:, :-1], steering)
                targets_BS = windows_BT[:, 1:]
                loss = head_loss(hidden_BSD.flatten(0, 1), self.model.head_VD, targets_BS.flatten(), 0.0)
            yield Predicted(windows_BT, documents_BS, loss.nll_N.view_as(targets_BS), routings)

    def inputs(self) -> AbstractContextManager[list[Tensor]]:
        """Yield a list that holds the last input (N, D) of each MoE layer after every forward pass in the block."""
        return inputs_of([layer for layer in self.model.feed_forwards if isinstance(layer, MoELayer)])

    def similarity(self) -> AbstractContextManager[ExpertSimilarity]:
        """Measure in every forward pass within the block how alike the experts are."""
        return record_similarity(self.model.feed_forwards)

    def pruned(self, pruning: Pruned) -> AbstractContextManager[list[int]]:
        """Compute only what `pruning` keeps within the block; yield how many choices each layer has kept so far."""
        return pruned(self.model.feed_forwards, pruning)

    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer; `UserError` for a run on symbols."""
        data = self.spec.config.data
        if data.source == "synthetic":
            raise UserError(f"{self.path} was trained on data=synthetic, whose symbols stand for no text")
        return load_tokenizer(data.vocab_size, self.places.tokenizer_path)

    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that is given the next ids of the samples, and returns the logits after the last."""
        return decoder_of(self.model, self.steering)

    def every_expert_flops(self) -> float:
        """Return the FLOPs of a pass with all experts beside the chosen ones, divided by those of a plain pass."""
        counted = parameters(self.model.shape)
        return 1 + 2 * counted.ffn_routed / counted.forward_flops(self.seq_len)


def load(path: Path, accelerator: str = "auto", places: DataPlaces = NOWHERE) -> TrainedRun:
    """Read a run's folder, with its final weights, or a checkpoint in it. Weights only: nothing in it is executed.

    Args:
        path: the run's folder, or a checkpoint in its folder `checkpoints`.
        accelerator: auto, cpu or cuda.
        places: where its data are.

    Raises:
        UserError: no finished run is there, its data are nowhere, or its checkpoint is damaged or another run's.
    """
    checkpoint = path / "checkpoints" / FINAL
    if path.suffix == ".ckpt":
        path, checkpoint = path.parent.parent, path
    spec, record = finished(path)
    device = resolve_device(accelerator)
    store = run_store(path, spec.config.data, record["data"]["tokens"], places)
    precision = resolve_precision("auto", device)
    module = build_module(spec, store, device, precision)
    module.load_state_dict(weights_of(checkpoint, spec.hash))
    data = spec.config.data
    validation = ValidationSplit.of(store, data.seq_len, spec.config.data_seed, data.validation_document_tokens)
    return TrainedRun(path, spec, record, store, module.eval().to(device), validation, device, precision, places)


def run_store(path: Path, data: DataConfig, tokens: str, places: DataPlaces) -> Store:
    """Return the store with the fingerprint `tokens`: in the user's data.cache_dir, or in that of the run, only read.

    If neither has it, it is prepared from the inputs that the user has given.

    Args:
        path: the run's folder.
        data: of its config.
        tokens: the fingerprint, of its record.
        places: of the user.

    Raises:
        UserError: it is nowhere, or what the user has given is other data.
    """
    for folder, remember in ((places.cache_dir, True), (data.cache_dir, False)):
        if folder is not None and (store := find(Path(folder), tokens, remember)):
            return store
    key = INPUT.get(data.source)
    if places.cache_dir is None or key is None or getattr(places, key) is None:
        looked = " and ".join(dict.fromkeys(str(place) for place in (places.cache_dir, data.cache_dir) if place))
        text, given = (f" data.{key}=...", f", or give data.{key}= here") if key else ("", "")
        raise UserError(
            f"the data of {path} (data={data.source}, tokens {tokens[:12]}) are not in {looked}: prepare them by "
            f"`python prepare.py data={data.source} data.vocab_size={data.vocab_size}{text}`{given}, or give "
            "data.cache_dir= of where they are"
        )
    inputs = {name: getattr(places, name) for name in ("files", "validation_files", "location") if hasattr(data, name)}
    here = {"cache_dir": places.cache_dir, "tokenizer_path": places.tokenizer_path, "threads": None}
    own = data.model_copy(update=here | inputs)
    store = prepare(own, progress=True)
    if store.fingerprints["tokens"] != tokens:
        raise UserError(
            f"{path} was trained on other data (tokens {tokens[:12]}) than data.{key}= gives with its other keys "
            f"(tokens {store.fingerprints['tokens'][:12]}): give the text that it was trained on"
        )
    return store


def finished(path: Path) -> tuple[RunSpec, dict[str, Any]]:
    """Return config and record of the run in a folder; `UserError` unless it has been run to its end there."""
    folder = RunFolder(path)
    if not (path / "config.yaml").exists():
        raise UserError(f"{path} is no run: give outputs/<name>/<run>, or outputs/<name> for all runs in it")
    spec, record = folder.read_spec(), folder.read_record()
    if record is None or record["status"] != "finished" or record["config_hash"] != spec.hash:
        raise UserError(f"{path} is not finished: give the command that started it again")
    return spec, record


def weights_of(file: Path, config_hash: str) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint.

    Raises:
        UnsuitedError: it is missing.
        UserError: it is damaged, or belongs to another config.
    """
    try:
        saved = read(file)
    except FileNotFoundError:
        raise UnsuitedError(f"{file} is missing: no checkpoint is there") from None
    except DamagedCheckpointError as error:
        raise UserError(f"{file} is damaged or no checkpoint of simbal ({error})") from None
    if saved["config_hash"] != config_hash:
        raise UserError(f"{file} belongs to another run than the folder that it is in")
    return dict(saved["state_dict"])


def runs_in(path: Path) -> list[Path]:
    """Return a run's own path, or those of all finished runs of outputs/<name>; `UserError` if there is none."""
    if (path / "config.yaml").exists():
        return [path]
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: give run=outputs/<name>/<run>, or run=outputs/<name>")
    found = [folder for folder in sorted(path.iterdir()) if (folder / "config.yaml").exists()]
    finished = [folder for folder in found if (RunFolder(folder).whole_record() or {}).get("status") == "finished"]
    if not finished:
        raise UserError(f"{path} holds no finished run")
    return finished


@contextmanager
def inputs_of(layers: Sequence[MoELayer]) -> Iterator[list[Tensor]]:
    """Yield a list that holds the last input (N, D) of each layer after every forward pass."""
    inputs = [torch.empty(0)] * len(layers)

    def keep(index: int) -> Any:
        def hook(_: MoELayer, args: tuple[Tensor, ...]) -> None:
            inputs[index] = args[0].flatten(0, 1)

        return hook

    handles = [layer.register_forward_pre_hook(keep(index)) for index, layer in enumerate(layers)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()

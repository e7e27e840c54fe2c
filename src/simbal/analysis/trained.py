"""A finished run, read back: its config, its record, its data and its model with the final weights.

Shapes: B sequences, S sequence length, T = S + 1.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simbal.checks import whole_number
from simbal.data.loader import windows_of
from simbal.data.store import Store, prepare
from simbal.errors import UserError
from simbal.model.head import head_loss
from simbal.model.router import Routing, Steering
from simbal.model.transformer import Transformer
from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec
from simbal.training.build import build_module, resolve_device, resolve_precision
from simbal.training.checkpoint import DamagedCheckpointError, read
from simbal.training.lit_moe import LitMoE


@dataclass(frozen=True)
class Predicted:
    """One batch of validation windows as the model saw it."""

    windows_BT: Tensor
    nll_BS: Tensor  # -log p of each target, in nats
    routings: list[Routing]  # of each MoE layer; none if dense


@dataclass(frozen=True)
class TrainedRun:
    """What an analysis of a run works on; the model is in evaluation mode."""

    path: Path
    spec: RunSpec
    record: dict[str, Any]
    store: Store
    module: LitMoE
    windows_WT: Any  # of the whole validation split, a view of the store
    device: torch.device
    precision: str

    @property
    def model(self) -> Transformer:
        """The transformer alone."""
        return self.module.model

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients, in the precision of the device."""
        mixed = self.precision == "bf16-mixed"
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext():
            yield

    def batches(self, batch_size: int, tokens: int | None = None) -> Iterator[Tensor]:
        """Windows (B, T) in file order, on the device: the first `tokens` of the validation split, or all of it."""
        for start in range(0, len(self._windows(tokens)), batch_size):
            windows_BT = self._windows(tokens)[start : start + batch_size].astype("int64")
            yield torch.from_numpy(windows_BT).to(self.device)

    def num_batches(self, batch_size: int, tokens: int | None = None) -> int:
        """How many `batches` gives."""
        return math.ceil(len(self._windows(tokens)) / batch_size)

    def _windows(self, tokens: int | None) -> Any:
        return self.windows_WT[: tokens and max(1, tokens // self.spec.config["data"]["seq_len"])]

    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """The model on each batch; routers choose as the run's strategies say, or as `steering` does."""
        steering = steering or self.module.balancing
        for windows_BT in self.batches(batch_size, tokens):
            with self.inference():
                hidden_BSD, routings = self.model(windows_BT[:, :-1], steering)
                targets_BS = windows_BT[:, 1:]
                loss = head_loss(hidden_BSD.flatten(0, 1), self.model.head_VD, targets_BS.flatten(), 0.0)
            yield Predicted(windows_BT, loss.nll_N.view_as(targets_BS), routings)


def check_pass(analysis: str, tokens: int | None, batch_size: int) -> None:
    """The keys that every analysis has which goes over the validation split; `UserError` for nonsense."""
    whole_number(f"analysis.{analysis}.batch_size", batch_size, 1)
    if tokens is not None:
        whole_number(f"analysis.{analysis}.tokens", tokens, 1)


def load(path: Path, accelerator: str = "auto") -> TrainedRun:
    """Read a run's folder, with its final weights; or a checkpoint in it. Weights only: nothing in it is executed.

    Raises:
        UserError: no finished run is there, its data are others now, or its checkpoint is damaged or another run's.
    """
    checkpoint = path / "checkpoints" / "final.ckpt"
    if path.suffix == ".ckpt":
        path, checkpoint = path.parent.parent, path
    spec, record = finished(path)
    store = prepare(spec.config["data"], progress=True)
    RunFolder(path).require_data(store.fingerprints["tokens"])
    device = resolve_device(accelerator)
    precision = resolve_precision("auto", device)
    module = build_module(spec, store, device, precision)
    module.load_state_dict(weights_of(checkpoint, spec.hash, module))
    windows_WT = windows_of(store.tokens("validation"), spec.config["data"]["seq_len"])
    return TrainedRun(path, spec, record, store, module.eval().to(device), windows_WT, device, precision)


def finished(path: Path) -> tuple[RunSpec, dict[str, Any]]:
    """Config and record of the run in a folder; `UserError` unless it has been run to its end there."""
    folder = RunFolder(path)
    if not (path / "config.yaml").exists():
        raise UserError(f"{path} is no run: give outputs/<name>/<run>, or outputs/<name> for all runs in it")
    spec, record = folder.read_spec(), folder.read_record()
    if record is None or record["status"] != "finished" or record["config_hash"] != spec.hash:
        raise UserError(f"{path} is not finished: give the command that started it again")
    return spec, record


def weights_of(file: Path, config_hash: str, module: nn.Module) -> dict[str, Tensor]:
    """The state of a checkpoint that belongs to this config and fits this module."""
    try:
        saved = read(file)
    except FileNotFoundError:
        raise UserError(f"{file} is missing: no checkpoint is there") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except DamagedCheckpointError as error:
        raise UserError(f"{file} is damaged or no checkpoint of simbal ({error})") from None
    state, written_for = saved["state_dict"], saved["config_hash"]
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if written_for != config_hash or {name: tensor.shape for name, tensor in state.items()} != expected:
        raise UserError(f"{file} belongs to another run than the folder that it is in")
    return dict(state)


def runs_in(path: Path) -> list[Path]:
    """A run itself, or every finished run of outputs/<name>; `UserError` if there is none."""
    if (path / "config.yaml").exists():
        return [path]
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: give run=outputs/<name>/<run>, or run=outputs/<name>")
    found = [folder for folder in sorted(path.iterdir()) if (folder / "config.yaml").exists()]
    finished = [folder for folder in found if (RunFolder(folder).whole_record() or {}).get("status") == "finished"]
    if not finished:
        raise UserError(f"{path} holds no finished run")
    return finished

"""A checkpoint as a folder that every rank writes its own part of, for any number of ranks to read.

    shard-00000.ckpt  what rank 0 holds of the tensors, and where in them it belongs; one file for each rank
    rest.ckpt         all that is the same on every rank, the sizes of the tensors and the number of shards

torch plans which rank writes and reads what (torch.distributed.checkpoint). The files are ours, as torch's own index is
a pickle, which executes whatever it says: these have the checksums of every other checkpoint, and are read as weights
alone.
"""

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from simbal.distributed import is_first
from simbal.errors import UserError
from simbal.files.disk import PART, sync
from simbal.processes.slots import usable_cores
from simbal.training.checkpoint_file import DamagedCheckpointError, opened_file, read_file, write_file

REST = "rest.ckpt"
FILES = re.compile(r"rest\.ckpt|shard-\d{5}\.ckpt")
WEIGHTS, MOMENTS = "weights/", "moments/"  # what the names of tensors begin with


@dataclass(frozen=True)
class Chunk:
    """A box of the tensor `name`, which begins at `offsets`."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it belongs in the whole tensor."""
        return tuple(slice(start, start + n) for start, n in zip(self.offsets, self.tensor.shape, strict=True))


def shard_file(folder: Path, rank: int) -> Path:
    """Return the path of what a rank has written."""
    return folder / f"shard-{rank:05d}.ckpt"


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder, whose name is gone first; any other folder is not ours to remove."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif all(FILES.fullmatch(part.name) for part in path.iterdir()):
        aside = path.with_name(f".{path.name}.removed{PART}")
        shutil.rmtree(aside, ignore_errors=True)
        path.replace(aside)
        shutil.rmtree(aside)


def verified(folder: Path) -> dict[str, Any]:
    """Return all of a checkpoint but its tensors, once the checksums of all files in its folder are verified.

    Raises:
        DamagedCheckpointError: it is not what was written: a file is missing or damaged, or another checkpoint's.
        OSError: the disk's fault.
    """
    try:
        rest = read_file(folder / REST)
        _require_whole(folder, rest)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"its {Path(error.filename).name} is missing") from None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # of what only others write
        raise DamagedCheckpointError(type(error).__name__) from None
    return rest


def assembled(folder: Path) -> dict[str, Any]:
    """Return a verified checkpoint as one file would hold it, with whole tensors, for a process without FSDP."""
    saved = opened_file(folder / REST)
    tensors: dict[str, Tensor] = {}
    for chunk in _chunks(_opened_shards(folder)):
        if chunk.name not in tensors:
            tensors[chunk.name] = chunk.tensor.new_zeros(saved["sizes"][chunk.name])
        tensors[chunk.name][chunk.box] = chunk.tensor
    saved["state_dict"] = {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}
    for state in saved.get("optimizer_states", ()):
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            if name.startswith(MOMENTS):
                parameter, _, key = name.removeprefix(MOMENTS).rpartition("/")
                moments[parameter][key] = tensor
        state["state"] = dict(moments)
    return saved


class Sharded(ModelParallelStrategy):
    """FSDP2 whose checkpoints are folders, saved and loaded without a rank that ever holds the whole model.

    A single file, as one device writes it, is loaded too.
    """

    def __init__(self, devices: int, config_hash: str) -> None:
        """Set the number of devices, and the hash of the run's config, which goes into every checkpoint."""
        super().__init__(devices, 1)
        self.config_hash = config_hash

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the shards of all ranks, and then, on the first, the rest of `checkpoint`; called by Lightning."""
        tensors = _named(checkpoint.pop("state_dict"), checkpoint.get("optimizer_states", []))
        rest = checkpoint | {"state_dict": {}}
        if "optimizer_states" in rest:
            rest["optimizer_states"] = [{"param_groups": state["param_groups"]} for state in rest["optimizer_states"]]
        writer = _Writer(Path(filepath), rest | {"config_hash": self.config_hash})
        try:
            with _own_errors():
                save(tensors, storage_writer=writer, planner=DefaultSavePlanner(False, False))
        except Exception:
            if is_first():
                shutil.rmtree(writer.part, ignore_errors=True)  # a full disk needs the room
            raise

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a verified checkpoint of any number of ranks, and return what is no tensor; called by Lightning."""
        folder = Path(checkpoint_path)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.model is not None
        rest = opened_file(folder / REST)
        states = [get_optimizer_state_dict(self.model, optimizer) for optimizer in self.optimizers]
        tensors = _named(get_model_state_dict(self.model), states)
        with _own_errors():
            load(tensors, storage_reader=_Reader(folder), planner=DefaultLoadPlanner(False, False))
        if self.optimizers:  # a validation has none
            (optimizer,), (state,), (saved,) = self.optimizers, states, rest["optimizer_states"]
            whole = {"state": state["state"], "param_groups": saved["param_groups"]}
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=whole)
        return rest


def _named(state_dict: Mapping[str, Any], optimizer_states: list[Any]) -> dict[str, Any]:
    """Return all tensors of a model and its optimizer, each by one name; they are the very tensors."""
    tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in state_dict.items()}
    for state in optimizer_states:
        for parameter, moments in state["state"].items():
            tensors |= {f"{MOMENTS}{parameter}/{key}": tensor for key, tensor in moments.items()}
    return tensors


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what has failed on a rank, in place of the `BaseException` that torch makes of it on every rank."""
    try:
        yield
    except CheckpointException as failed:
        raise failed.failures[min(failed.failures)][0] from failed


def _require_whole(folder: Path, rest: dict[str, Any]) -> None:
    """Raise `DamagedCheckpointError` unless the shards beside `rest` are those of its step, and fill every tensor."""
    files = sorted(folder.glob("shard-*.ckpt"))
    if files != [shard_file(folder, rank) for rank in range(len(files))] or len(files) != rest["shards"]:
        raise DamagedCheckpointError(f"it has {len(files)} of {rest['shards']} shards")
    with ThreadPoolExecutor(usable_cores()) as pool:
        shards = [*pool.map(read_file, files)]
    for file, shard in zip(files, shards, strict=True):
        if (shard["config_hash"], shard["global_step"]) != (rest["config_hash"], rest["global_step"]):
            raise DamagedCheckpointError(f"its {file.name} is of another checkpoint")
    chunks, filled = [*_chunks(shards)], dict.fromkeys(rest["sizes"], 0)
    for chunk in chunks:
        within = zip(chunk.box, rest["sizes"][chunk.name], strict=True)
        if any(part.start < 0 or part.stop > size for part, size in within):
            raise DamagedCheckpointError(f"a part of {chunk.name!r} is none of it")
        filled[chunk.name] += chunk.tensor.numel()
    if any(filled[name] != math.prod(map(index, size)) for name, size in rest["sizes"].items()):
        raise DamagedCheckpointError("its shards do not fill its tensors")


def _opened_shards(folder: Path) -> list[dict[str, Any]]:
    return [opened_file(file) for file in sorted(folder.glob("shard-*.ckpt"))]


def _chunks(shards: Iterable[Mapping[str, Any]]) -> Iterator[Chunk]:
    """Yield what the shards hold; tensors are mapped, not read."""
    for shard in shards:
        for name, tensor in shard["state_dict"].items():
            yield Chunk(name, tuple(map(index, shard["offsets"][name])), tensor)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor in the computer's memory whose storage holds nothing but it, as torch.save writes all of that."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Writer(FileSystemWriter):
    """Writes the shards to a folder of another name, and renames it once all of them are on the disk."""

    def __init__(self, folder: Path, rest: dict[str, Any]) -> None:
        self.folder, self.part, self.rest = folder, folder.with_name(f".{folder.name}{PART}"), rest
        super().__init__(self.part)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder and number the shards; on the first rank, before any writes."""
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir(parents=True)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard."""
        if not self.part.is_dir():
            raise UserError(f"{self.part.parent} is not on every machine: choose an output_dir= on a disk they share")
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
            assert item.index.fqn not in tensors, f"two parts of {item.index.fqn} are in one shard"
            tensors[item.index.fqn] = _alone(tensor)
        offsets = {item.index.fqn: [*(item.index.offset or ())] for item in plan.items}
        shard = {key: self.rest[key] for key in ("config_hash", "global_step")}
        write_file(shard | {"state_dict": tensors, "offsets": offsets}, shard_file(self.part, plan.storage_data))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the rest and rename the folder; on the first rank, after all have written."""
        sizes = {name: [*found.size] for name, found in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]
        write_file(self.rest | {"shards": len(results), "sizes": sizes}, self.part / REST)
        remove(self.folder)  # neither a file nor a folder gives way to a folder
        self.part.replace(self.folder)
        sync(self.folder.parent)


class _Reader(FileSystemReader):
    """Reads of the shards, which are mapped, what a rank needs."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return where each part of every tensor is."""
        chunks = [*_chunks(_opened_shards(Path(self.path)))]
        sizes = opened_file(Path(self.path) / REST)["sizes"]
        boxes: dict[str, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            boxes[chunk.name].append(chunk)
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(parts[0].tensor.dtype),
                torch.Size(sizes[name]),
                [ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape) for part in parts],
            )
            for name, parts in boxes.items()
        }
        return Metadata(dict(tensors), storage_data={MetadataIndex(c.name, c.offsets): c.tensor for c in chunks})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            chunk = self.storage_data[item.storage_index]
            box = [slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True)]
            target = planner.resolve_tensor(item)
            target.copy_(chunk[tuple(box)] if chunk.ndim else chunk)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

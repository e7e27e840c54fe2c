"""A checkpoint in shards: what is damaged or another's is noticed before it is believed."""

import os
import pickle

import pytest
import torch

from simbal.training import checkpoint, shards
from simbal.training.checkpoint import DamagedCheckpointError, write_file

HASH, STEP = "hash", 8
WEIGHT, BIAS, MOMENT = torch.arange(12.0).reshape(6, 2), torch.arange(3), torch.arange(12.0).reshape(6, 2) / 7
NAMES = {"weights/layer.weight": [6, 2], "weights/bias": [3], "moments/layer.weight/exp_avg": [6, 2]}


def shard(rank: int, **changed):
    """Of two ranks the first has four of the weight's rows and the bias, the second has two rows."""
    rows = slice(0, 4) if rank == 0 else slice(4, 6)
    tensors = {"weights/layer.weight": WEIGHT[rows].clone(), "moments/layer.weight/exp_avg": MOMENT[rows].clone()}
    offsets = {name: [rows.start, 0] for name in tensors}
    if rank == 0:
        tensors, offsets = tensors | {"weights/bias": BIAS}, offsets | {"weights/bias": [0]}
    return {"state_dict": tensors, "offsets": offsets, "config_hash": HASH, "global_step": STEP} | changed


def rest(**changed):
    groups = [{"lr": 0.1, "params": ["layer.weight"]}]
    return {
        "state_dict": {}, "config_hash": HASH, "global_step": STEP, "shards": 2, "sizes": NAMES,
        "optimizer_states": [{"param_groups": groups}], "callbacks": {"Telemetry": {"bytes": 0, "sha256": ""}},
    } | changed  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A whole one, with the one before it."""
    write_file(rest() | {"global_step": 4}, tmp_path / "step-00000004.ckpt")
    folder = tmp_path / "step-00000008.ckpt"
    folder.mkdir()
    for rank in (0, 1):
        write_file(shard(rank), shards.shard_file(folder, rank))
    write_file(rest(), folder / shards.REST)
    return folder


def newest(folder):
    return checkpoint.newest(folder.parent, HASH, lambda curves: None).step


def test_it_is_put_together_as_one_file_has_it(folder):
    saved = checkpoint.read(folder)
    assert torch.equal(saved["state_dict"]["layer.weight"], WEIGHT)
    assert torch.equal(saved["state_dict"]["bias"], BIAS)
    (state,) = saved["optimizer_states"]
    assert torch.equal(state["state"]["layer.weight"]["exp_avg"], MOMENT)
    assert newest(folder) == STEP
    parameter = torch.nn.Parameter(torch.zeros(6, 2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], MOMENT)


class Hostile:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


def _flip_a_bit_of_a_tensor(file):
    content = bytearray(file.read_bytes())
    content[content.index(WEIGHT[:2].numpy().tobytes()) if file.name == "shard-00000.ckpt" else -40] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "damage", "says"),
    [
        ("rest.ckpt", lambda file: file.unlink(), "its rest.ckpt is missing"),
        ("rest.ckpt", _truncate, "BadZipFile"),
        ("shard-00001.ckpt", lambda file: file.unlink(), "it has 1 of 2 shards"),
        ("shard-00000.ckpt", lambda file: file.unlink(), "it has 1 of 2 shards"),
        ("shard-00001.ckpt", _truncate, "BadZipFile"),
        ("shard-00000.ckpt", _flip_a_bit_of_a_tensor, "its part .*data/0 is damaged"),
        ("shard-00001.ckpt", lambda file: write_file(shard(1, global_step=7), file), "shard-00001.ckpt is of another"),
        ("shard-00001.ckpt", lambda file: write_file(shard(1, config_hash="x"), file), "is of another checkpoint"),
        ("shard-00001.ckpt", lambda file: write_file(shard(1, state_dict={}), file), "do not fill its tensors"),
        ("shard-00001.ckpt", lambda file: write_file(shard(0), file), "do not fill its tensors"),
        ("shard-00001.ckpt", lambda file: write_file(shard(1, offsets={}), file), "KeyError"),
        ("rest.ckpt", lambda file: write_file(rest(sizes=NAMES | {"weights/more": [2]}), file), "do not fill"),
        ("rest.ckpt", lambda file: write_file(rest(sizes={}), file), "KeyError"),
        ("rest.ckpt", lambda file: write_file(rest(shards=10**15), file), "it has 2 of 1000000000000000 shards"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_passed_over_for_the_one_before(folder, part, damage, says):
    damage(folder / part)
    for reader in (checkpoint.read, checkpoint.facts):
        with pytest.raises(DamagedCheckpointError, match=says):
            reader(folder)
    assert newest(folder) == 4
    assert folder.with_name("step-00000008.ckpt.damaged").is_dir()
    checkpoint.remove_periodic(folder.parent)
    assert not [*folder.parent.iterdir()]


@pytest.mark.parametrize("name", ["rest.ckpt", "shard-00001.ckpt", ".metadata"])
@pytest.mark.parametrize("plain", [True, False])
def test_no_pickle_in_it_is_executed(folder, tmp_path, name, plain):
    """Torch's own index of such a folder, .metadata, is a plain pickle; ours has none, and one is not looked at."""
    mark = tmp_path / "executed"
    with (folder / name).open("wb") as file:
        content = rest(evil=Hostile(mark))
        pickle.dump(content, file) if plain else torch.save(content, file)
    if name == ".metadata":
        assert torch.equal(checkpoint.read(folder)["state_dict"]["bias"], BIAS)
    else:
        with pytest.raises(DamagedCheckpointError):
            checkpoint.read(folder)
    assert not mark.exists()


def test_the_step_is_the_one_inside(folder):
    other = folder.rename(folder.with_name("step-00000012.ckpt"))
    with pytest.raises(DamagedCheckpointError, match="it is that of step 8"):
        checkpoint.facts(other)

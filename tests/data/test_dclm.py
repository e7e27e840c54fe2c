import pytest
from fsspec.implementations.memory import MemoryFileSystem

from simbal.data.store import open_source, prepare
from simbal.errors import UserError


@pytest.fixture
def shards(tmp_path, jsonl, keys):
    """`shards(num_shards=2)`: the keys of shards 0 to 4, each of which has ten texts that name it."""
    for shard in range(5):
        jsonl([f"text {number} of shard {shard}" for number in range(10)], f"CC_shard_{shard:04d}.jsonl")
    location = f"{tmp_path}/CC_shard_{{shard:04d}}.jsonl"
    return lambda **changed: keys("dclm", **{"location": location, "vocab_size": 300, **changed})


def test_the_last_shard_is_held_out_whole(shards):
    store = prepare(shards(first_shard=1, num_shards=2, validation_shard=4), progress=False)
    assert [name[-10:] for name in store.meta["inputs"]] == ["0001.jsonl", "0002.jsonl", "0004.jsonl"]
    assert [len(store.document_ends(split)) for split in ("train", "validation")] == [20, 10]


def test_shards_are_named_by_their_number(keys):
    source = open_source(keys("dclm", num_shards=2))
    start = "hf://datasets/mlfoundations/dclm-pool-400m-1x@main/CC_shard_0000"
    assert source.units() == [f"{start}{number}.jsonl.zst" for number in ("0000", "0001", "2827")]
    plain = open_source(keys("dclm", num_shards=1, location="s3://b/{shard}/a.{shard:03d}.jsonl.gz"))
    assert plain.units() == ["s3://b/0/a.000.jsonl.gz", "s3://b/2827/a.2827.jsonl.gz"]


def test_the_identity_needs_no_network_and_changes_with_what_is_read(keys, shards):
    default = open_source(keys("dclm")).identity()
    assert len(default["files"]) == 259
    assert default["files"][-1][0] == "validation"
    local = [open_source(shards(num_shards=n, validation_shard=v)).identity() for n, v in ((1, 3), (2, 3), (1, 4))]
    assert len({str(identity) for identity in [default, *local]}) == 4


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_shards": 0}, "data.num_shards=0 must be at least 1"),
        ({"first_shard": -1}, "data.first_shard=-1 must be at least 0"),
        ({"validation_shard": 2828}, "data.validation_shard=2828 must be at most 2827"),
        ({"first_shard": 2800, "num_shards": 29}, "data.first_shard=2800 and data.num_shards=29 end at shard 2828"),
        ({"validation_shard": 0}, "data.validation_shard=0 is one of the training shards, 0 to 257"),
        ({"validation_shard": 257}, "data.validation_shard=257 is one of the training shards, 0 to 257"),
        ({"on_bad_record": "ignore"}, "data.on_bad_record=ignore is not one of error, skip"),
    ],
)  # fmt: skip
def test_shards_that_make_no_sense_are_refused(keys, changed, sentence):
    keys("dclm")
    keys("dclm", validation_shard=258)
    with pytest.raises(UserError, match=sentence):
        keys("dclm", **changed)


def test_a_build_that_was_interrupted_goes_on_with_the_next_shard(shards, tmp_path):
    files = MemoryFileSystem()
    for shard in (0, 1, 4):
        files.pipe(f"/dclm/{shard}.jsonl", (tmp_path / f"CC_shard_{shard:04d}.jsonl").read_bytes())
    whole = prepare(shards(num_shards=2, validation_shard=4), progress=False)
    good = files.cat("/dclm/1.jsonl")
    files.pipe("/dclm/1.jsonl", good + b"no json")
    data = shards(num_shards=2, validation_shard=4, location="memory://dclm/{shard}.jsonl")
    with pytest.raises(UserError, match="memory://dclm/1.jsonl, line 11: this is not JSON.*\n.*after input 1 of 3"):
        prepare(data, progress=False)
    files.pipe("/dclm/1.jsonl", good)
    files.rm("/dclm/0.jsonl")
    assert prepare(data, progress=False).fingerprints == whole.fingerprints
    files.rm("/dclm", recursive=True)

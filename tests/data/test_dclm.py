import re
import shlex
from pathlib import Path

import fsspec.core
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hydra.core.override_parser.overrides_parser import OverridesParser

from simbal.config.catalogue import first_comment
from simbal.data.store import open_source, prepare
from simbal.errors import UserError


class Unreachable:
    protocol = ("hf",)

    def invalidate_cache(self):
        raise ConnectionError("no network")


@pytest.fixture
def shards(tmp_path, jsonl, keys):
    """`shards(num_shards=2)`: the keys of shards 0 to 4, each of which has ten texts that name it."""
    for shard in range(5):
        jsonl([f"text {number} of shard {shard}" for number in range(10)], f"CC_shard_{shard:04d}.jsonl")
    location = f"{tmp_path}/CC_shard_{{shard:04d}}.jsonl"
    return lambda **changed: keys("dclm", **{"location": location, "vocab_size": 300, **changed})


@pytest.fixture
def unreachable(monkeypatch):
    monkeypatch.setattr("simbal.files.remote.PAUSES", ())
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (Unreachable(), url))


def test_the_last_shard_is_held_out_whole(shards):
    store = prepare(shards(first_shard=1, num_shards=2, validation_shard=4), progress=False)
    assert [entry["name"][-10:] for entry in store.meta["inputs"]] == ["0001.jsonl", "0002.jsonl", "0004.jsonl"]
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


def test_a_shard_that_is_not_there_is_named(shards):
    with pytest.raises(UserError, match="data.location with shard=5: .*CC_shard_0005.jsonl: No such file"):
        prepare(shards(first_shard=4, num_shards=2, validation_shard=0), progress=False)


@pytest.mark.parametrize("location", ["shards/*.jsonl", "a{shard.jsonl", "a{shard:x}.jsonl", "a{number}.jsonl"])
def test_a_location_without_a_place_for_the_number_is_refused(keys, location):
    with pytest.raises(
        UserError, match=f"data.location={re.escape(location)} must contain {{shard}}, or {{shard:08d}}"
    ):
        open_source(keys("dclm", location=location))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_shards": 0}, "data.num_shards=0 must be at least 1"),
        ({"first_shard": -1}, "data.first_shard=-1 must lie between 0 and 2827"),
        ({"validation_shard": 2828}, "data.validation_shard=2828 must lie between 0 and 2827"),
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


def test_without_a_network_the_commands_for_copies_by_hand_are_given(keys, unreachable, shards, tmp_path):
    with pytest.raises(UserError) as raised:
        prepare(keys("dclm", num_shards=2), progress=False)
    sentence, fetch, read = str(raised.value).splitlines()
    assert re.match(
        r"hf://.*CC_shard_00000000.jsonl.zst cannot be fetched .ConnectionError: no network; 1 att", sentence
    )
    assert shlex.split(fetch) == [
        "hf", "download", "mlfoundations/dclm-pool-400m-1x", "CC_shard_00000000.jsonl.zst",
        "CC_shard_00000001.jsonl.zst", "CC_shard_00002827.jsonl.zst", "--repo-type", "dataset", "--local-dir", "DIR",
    ]  # fmt: skip
    python, program, *overrides = shlex.split(read)
    assert (python, program) == ("python", "prepare.py")
    values = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(overrides)}
    assert values["data.location"] == "DIR/CC_shard_{shard:08d}.jsonl.zst"
    assert (values["data.num_shards"], values["data.validation_shard"]) == (2, 2827)


def test_many_shards_are_named_by_a_loop_of_the_shell(keys, unreachable):
    source = open_source(keys("dclm", location="hf://datasets/a/b@abc/sub/{shard:08d}.jsonl.zst"))
    with pytest.raises(
        UserError, match=r"hf download a/b \$\(printf 'sub/%08d.jsonl.zst ' \$\(seq 0 257\) 2827\) .*vision abc"
    ):
        list(source.read(source.units()[0], {}))


def test_other_places_are_told_without_a_command(keys, unreachable):
    source = open_source(keys("dclm", num_shards=1, location="s3://bucket/{shard}.jsonl.gz"))
    with pytest.raises(UserError, match="fetch the 2 files of s3://bucket/{shard}.jsonl.gz into a folder DIR"):
        list(source.read(source.units()[0], {}))


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


def test_the_options_first_lines_say_on_what_terms_the_text_is_used():
    about = " ".join(first_comment(Path(__file__).parents[2] / "conf/data/dclm.yaml"))
    assert "The text stays under Common Crawl's terms of use" in about
    assert "mlfoundations/dclm issue 110" in about

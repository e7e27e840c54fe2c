"""The source `dclm`: shards of DCLM's pool, the paper's data: raw web text, multilingual and not deduplicated.

The text stays under Common Crawl's terms of use; simbal redistributes none of it. DCLM's README marks this route as
deprecated, for some of its files are broken (mlfoundations/dclm issue 110): a broken shard stops the build.
"""

import re
import shlex
from typing import Any

from simbal.data.sources.files import Files
from simbal.errors import UserError

_SHARD = re.compile(r"\{shard(?::0(\d+)d)?\}")
_HUB = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]*))?/(.+)")  # repository, revision and file


def open_dclm(data: Any) -> Files:
    """Return the source of `num_shards` shards from `first_shard` on, and of one more that is held out whole."""
    if not _SHARD.search(data.location):
        raise UserError(
            f"data.location={data.location} must contain {{shard}}, or {{shard:08d}} for eight digits: "
            "the number of each shard is put there"
        )
    shards = range(data.first_shard, data.first_shard + data.num_shards)
    return Files(
        files=[_fill(data.location, shard) for shard in shards],
        validation_files=[_fill(data.location, data.validation_shard)],
        text_key=data.text_key,
        encoding="utf-8",
        txt_split="file",
        on_bad_record=data.on_bad_record,
        validation_one_in=data.validation_one_in,
        cache_dir=data.cache_dir,
        keys=("data.location", "data.location"),
        by_hand=_commands(data),
    )


def _commands(data: Any) -> str:
    """Return the commands that download all shards on a machine with network and read the copies here."""
    last = data.first_shard + data.num_shards - 1
    if hub := _HUB.fullmatch(data.location):
        repository, revision, file = hub.groups()
        # a shell's braces count with leading zeros: {00000000..00000257}
        counted = _SHARD.sub(lambda width: f"{{{_digits(width, data.first_shard)}..{_digits(width, last)}}}", file)
        names = f"{counted} {_fill(file, data.validation_shard)}"
        download = (
            f"hf download {repository} {names} --repo-type dataset --revision {revision or 'main'} --local-dir DIR"
        )
    else:
        file = data.location.rpartition("/")[2]
        download = f"download the {data.num_shards + 1} files of {data.location} to a folder DIR"
    keys = " ".join(f"data.{key}={getattr(data, key)}" for key in ("first_shard", "num_shards", "validation_shard"))
    place = shlex.quote(f'data.location="DIR/{file}"')  # Hydra takes braces only within quotes of its own
    return f". To read copies:\n  {download}\n  python prepare.py data=dclm {place} {keys}"


def _fill(template: str, shard: int) -> str:
    return _SHARD.sub(lambda width: _digits(width, shard), template)


def _digits(width: re.Match[str], shard: int) -> str:
    return str(shard).zfill(int(width[1] or 0))

"""What a disk says when it does not take a file, and what helps: space where it is full, else another place."""

import errno
import os
from pathlib import Path

import pytest

from simbal.errors import UserError
from simbal.files.disk import refusal, refusals_of_disk, write_json
from simbal.training.run import train

FULL, LIMITED = (errno.ENOSPC, errno.EDQUOT), (errno.EFBIG,)
ELSEWHERE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR,
    errno.ELOOP,
)  # fmt: skip


@pytest.mark.parametrize("number", [*FULL, *LIMITED, *ELSEWHERE])
def test_space_is_asked_for_where_it_helps(number):
    place, error = Path("outputs/x"), OSError(number, os.strerror(number))
    with pytest.raises(UserError) as refused, refusals_of_disk(place):
        raise error
    said = str(refused.value)
    assert said == refusal(place, error)
    assert said.startswith(f"cannot write outputs/x: {os.strerror(number)}; ")
    assert ("free some space" in said) == (number in FULL)
    assert ("`ulimit -f`" in said) == (number in LIMITED)
    assert ("choose another output_dir=" in said) == (number not in LIMITED)
    assert refusal(place, error, "to").endswith("another to=") == (number not in LIMITED)


@pytest.mark.parametrize("place", ["/proc/nope", "/dev/null/x", "/proc/self/x"])
def test_a_place_where_nothing_can_be_made_is_not_called_full(small_spec, place):
    with pytest.raises(UserError, match=f"cannot write {place}/.*; choose another output_dir=") as refused:
        train(small_spec(output_dir=Path(place)))
    assert "space" not in str(refused.value)


def test_a_folder_in_the_place_of_a_file_is_a_sentence(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UserError, match=f"cannot write {tmp_path}: Is a directory; choose another output_dir="):
        write_json(tmp_path / "a.json", {})

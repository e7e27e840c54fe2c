"""The finished runs of a study without their weights, runs.tar.xz: what its numbers are made of, and where it goes on.

A study can so be done in parts, on one machine after another, and gain an arm later: `reproduce` puts the runs back
into the study's folder of runs, where the sweep finds them finished.
"""

import shutil
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from lzma import LZMAError
from pathlib import Path
from tarfile import TarInfo

from simbal.errors import UserError
from simbal.files.disk import PART, refusals_of_disk, replacing
from simbal.report.collect import Run
from simbal.runs.folder import CONFIG_FILE, CURVES_FILE, DOCUMENTS_FILE, RECORD_FILE
from simbal.runs.removal import delete_runs

RUNS = "runs.tar.xz"
KEPT = (CONFIG_FILE, RECORD_FILE, CURVES_FILE, DOCUMENTS_FILE, "analysis/*.json")
ENDS = ("finished", "diverged", "pruned")  # on any machine; what failed or was killed may come to another elsewhere
LARGEST = 1 << 30  # bytes of all files together, unpacked
WRONG = "is not the archive of a study: put it back as it was"


def keep(runs: Sequence[Run], folder: Path) -> None:
    """Write the runs that have come to an end of their own to runs.tar.xz; the same runs give the same bytes."""
    ended = [run.path for run in runs if run.record is not None and run.record["status"] in ENDS]
    files = {str(file.relative_to(run.parent)): file for run in ended for part in KEPT for file in run.glob(part)}
    with refusals_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / RUNS) as opened, tarfile.open(fileobj=opened, mode="w:xz") as archive:
            for name in sorted(
                files, key=lambda name: (name.rpartition("/")[2], name)
            ):  # alike side by side packs best
                archive.add(files[name], name, recursive=False, filter=_anonymous)


def bring_back(folder: Path, runs: Path) -> int:
    """Put the runs of `folder`'s runs.tar.xz into the folder `runs`, but those that have ended there; return how many.

    Raises:
        UserError: the archive is broken, or has something else than files of runs.
        BusyError: one of them is being trained.
    """
    if not (folder / RUNS).exists():
        return 0
    aside = runs / f".kept{PART}"
    with refusals_of_disk(runs):
        shutil.rmtree(aside, ignore_errors=True)
        _unpack(folder / RUNS, aside)
        new = [run for run in sorted(aside.iterdir()) if not (runs / run.name / RECORD_FILE).exists()]
        delete_runs([runs / run.name for run in new if (runs / run.name).exists()])
        for run in new:
            run.rename(runs / run.name)
        shutil.rmtree(aside)
    return len(new)


def _unpack(file: Path, place: Path) -> None:
    place.mkdir(parents=True)
    try:
        with tarfile.open(file, "r:xz") as archive:
            members = archive.getmembers()
            if not all(map(_is_kept, members)) or sum(member.size for member in members) > LARGEST:
                raise UserError(f"{file} {WRONG}")
            archive.extractall(place, members, filter="data")
    except (tarfile.TarError, LZMAError, EOFError, ValueError) as error:
        raise UserError(f"{file} {WRONG}") from error


def _is_kept(member: TarInfo) -> bool:
    run, _, file = member.name.partition("/")
    return member.isfile() and run not in ("", ".", "..") and any(fnmatchcase(file, pattern) for pattern in KEPT)


def _anonymous(member: TarInfo) -> TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime, member.mode = 0, 0o644
    return member

"""Writes folders of runs into one compressed file, from which tar brings them back."""

import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tarfile import TarInfo

from simbal.errors import UserError
from simbal.files.disk import refusals_of_disk, replacing
from simbal.runs.folder import RunFolder, refuse_busy, run_folders

LOCKS = (".lock", ".lock.lease")


def write_archive(paths: Sequence[Path], file: Path) -> int:
    """Write runs to a new .tar.gz, as `<name>/<run>/...`; return how many. A link is kept as a link.

    Raises:
        UserError: the file is there already, what is named is no run, or the disk refuses.
        BusyError: a run is being trained.
    """
    if file.exists() or file.is_symlink():
        raise UserError(f"{file} is there already: give another --to")
    runs = run_folders(paths)
    refuse_busy(runs)
    names = [f"{run.absolute().parent.name}/{run.absolute().name}" for run in runs]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"two of these runs would be {min(twice)} in the archive: write one archive for each")
    with refusals_of_disk(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened, tarfile.open(fileobj=opened, mode="w:gz") as archive:
            for run, name in zip(runs, names, strict=True):
                with RunFolder(run).lock():
                    archive.add(run, name, filter=_kept)
    return len(runs)


def _kept(member: TarInfo) -> TarInfo | None:
    """Return a member without the names of its owner; None for locks, pipes and devices."""
    if member.name.rpartition("/")[2] in LOCKS or not (member.isfile() or member.isdir() or member.issym()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

"""`outputs/<name>/sweep.json`: the last command that filled the folder, and the runs that it asked for."""

import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from simbal.run_folder import refusals_of_disk, write_json
from simbal.sweep.job import Job
from simbal.sweep.plan import labels

PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]*(?=@)|([?&]password=)[^&\s]*")  # of a database's address


def write_sweep_file(jobs: Sequence[Job]) -> None:
    """In each of the folders; a table can then name the runs that were never started."""
    folders: dict[Path, dict[str, str]] = defaultdict(dict)
    for job, label in zip(jobs, labels(jobs), strict=True):
        folders[job.spec.path.parent].setdefault(job.spec.path.name, label)
    for folder, runs in folders.items():
        write(folder, runs)


def write(folder: Path, runs: dict[str, str]) -> None:
    """`runs`: label by folder name; none for a search, which finds out as it goes what it will run."""
    with refusals_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "sweep.json", {"command": without_passwords(shlex.join(sys.orig_argv[1:])), "runs": runs})


def without_passwords(command: str) -> str:
    """`postgresql://ada:***@host/db`."""
    return PASSWORD.sub(lambda match: f"{match[1] or match[2]}***", command)

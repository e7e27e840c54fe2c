"""A run's folder: `<output_dir>/<name>/<readable>-<hash8>/`, who it belongs to, and how it ended.

    config.yaml    the resolved config and the chosen options; written first
    progress.json  where a running job is, for the live view; replaced while it runs
    metrics.jsonl  curves, one JSON object per logged step
    record.json    how the run ended; written last and atomically
    prune.json     a sweep's word that the run is to stop; only while it is being stopped
    checkpoints/   tensorboard/   train.log

No torch here: the sweep's parent process and `report.py` read folders without it.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from simbal import saved_yaml
from simbal.atomic_file import replace_text
from simbal.errors import UserError
from simbal.run_spec import RunSpec

DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
STATUSES = ("finished", "failed", "killed", "pruned")  # killed: by a signal, so that the next sweep goes on with it
PRUNE_FILE = "prune.json"


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old file or the new one, never a part (NaN is refused)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` at once; `UserError` if the disk refuses."""
    with refusals_of_disk(path.parent):
        replace_text(path, text)


@contextmanager
def refusals_of_disk(folder: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a `UserError`, also where torch.save has hidden it in another."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause and not (isinstance(cause, OSError) and cause.errno in DISK_REFUSES):
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"cannot write {folder}: {cause.strerror}; free some space, or set output_dir") from error


class BusyError(UserError):
    """Another process is writing the run."""


class RunFolder:
    """Reads and writes one run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_spec(self) -> RunSpec:
        """What config.yaml says; `UserError` if it is not ours."""
        file = self.path / "config.yaml"
        try:
            saved = saved_yaml.parse(file.read_text(encoding="utf-8"))
            return RunSpec({k: v for k, v in saved.items() if k != "choices"}, dict(saved["choices"]))
        except (yaml.YAMLError, KeyError, TypeError, ValueError):
            raise UserError(f"{file} is not a config written by simbal") from None

    def belongs_to(self, spec: RunSpec) -> bool:
        """Whether the run has begun here; `UserError` if another one has."""
        if not (self.path / "config.yaml").exists():
            return False
        if self.read_spec().hash != spec.hash:
            raise UserError(f"{self.path} belongs to another config: move it away, or choose another name=")
        return True

    def write_spec(self, spec: RunSpec) -> None:
        """Make the folder this run's own; refuse one that belongs to another config."""
        if self.belongs_to(spec):
            return
        with refusals_of_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        saved = {"choices": spec.choices, **spec.config}
        write_text(self.path / "config.yaml", yaml.safe_dump(saved, sort_keys=False))

    def read_record(self) -> dict[str, Any] | None:
        """How the run ended, or None if it has not; `UserError` if the record is broken."""
        file = self.path / "record.json"
        if not file.exists():
            return None
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["status"] in STATUSES and isinstance(record["config_hash"], str):
                return dict(record)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            pass
        raise UserError(f"{file} is broken: delete {self.path} and run it again")

    def write_record(self, record: dict[str, Any]) -> None:
        """Say how the run ended: `status` is one of STATUSES, `config_hash` says of which config."""
        write_json(self.path / "record.json", record)

    def finished(self, spec: RunSpec) -> bool:
        """Whether exactly this config has been run to its end here; `UserError` as `belongs_to`."""
        record = self.read_record() if self.belongs_to(spec) else None
        return record is not None and record["status"] == "finished" and record["config_hash"] == spec.hash

    def require_data(self, tokens: str) -> None:
        """Refuse a finished run whose data were others than those of the fingerprint `tokens`.

        The config names its data but does not hold them: files can change, packages can be upgraded.
        """
        record = self.read_record()
        if record is not None and record["status"] == "finished" and record["data"]["tokens"] != tokens:
            raise UserError(
                f"{self.path} was finished on other data (tokens {record['data']['tokens'][:12]}, "
                f"now {tokens[:12]}): move it away, or choose another name="
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process; `BusyError` if another one has it.

        The lock ends with the process. Across machines it holds where the file system supports flock, as NFS 4 does.
        """
        with refusals_of_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise BusyError(f"{self.path} is being written by {file.read().strip() or 'another process'}") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def busy(self) -> bool:
        """Whether another process holds the folder at this moment."""
        try:
            with self.lock():
                return False
        except BusyError:
            return True

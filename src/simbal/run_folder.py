"""A run's folder: `<output_dir>/<name>/<readable>-<hash8>/`, who it belongs to, and how it ended.

    config.yaml    the resolved config and the chosen options; written first
    progress.json  where a running job is, for the live view; replaced while it runs
    metrics.jsonl  curves, one JSON object per logged step
    record.json    how the run ended, with checksums of itself and of the curves; written last and atomically. One that
                   was found damaged is kept as record.json.damaged
    prune.json     a sweep's word that the run is to stop; only while it is being stopped
    checkpoints/   tensorboard/   train.log

No torch here: the sweep's parent process and `report.py` read folders without it.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from simbal import record_schema, saved_yaml
from simbal.disk import DISK_REFUSES, refusals_of_disk, write_json, write_text
from simbal.errors import UserError
from simbal.run_spec import RunSpec

__all__ = [
    "CURVES_FILE", "DISK_REFUSES", "PRUNE_FILE", "STATUSES", "BusyError", "DamagedRecordError", "RunFolder",
    "refusals_of_disk", "write_json", "write_text",
]  # fmt: skip
STATUSES = record_schema.STATUSES
PRUNE_FILE = "prune.json"
RECORD_FILE, DAMAGED_FILE, CURVES_FILE = "record.json", "record.json.damaged", "metrics.jsonl"
LARGEST_CONFIG, LARGEST_RECORD = 1 << 20, 1 << 26  # bytes; ours are a thousandth of that


class BusyError(UserError):
    """Another process is writing the run."""


class DamagedRecordError(UserError):
    """A record is not what was written, so that the run counts as unfinished; `reason` says why in a few words."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file} is damaged ({reason}): give the command that made it again, to do the run again")
        self.reason = reason


class RunFolder:
    """Reads and writes one run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_spec(self) -> RunSpec:
        """What config.yaml says; `UserError` if it is not ours."""
        file = self.path / "config.yaml"
        try:
            saved = saved_yaml.parse(_content(file, LARGEST_CONFIG).decode())
            return RunSpec.saved({k: v for k, v in saved.items() if k != "choices"}, saved["choices"])
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, KeyError, TypeError, ValueError):
            raise UserError(f"{file} is not a config written by simbal") from None

    def belongs_to(self, spec: RunSpec) -> bool:
        """Whether the run has begun here; `UserError` if another one has."""
        with refusals_of_disk(self.path):
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
        """How the run ended, or None if it has not.

        Raises:
            DamagedRecordError: the record is not what was written: cut short, changed or never a record.
            UserError: it cannot be read.
        """
        return self._read(RECORD_FILE)

    def whole_record(self) -> dict[str, Any] | None:
        """How the run ended, or None if it has not or if its record is damaged."""
        with suppress(DamagedRecordError):
            return self.read_record()
        return None

    def set_aside_damaged_record(self) -> str | None:
        """Rename a damaged record, so that the run is done again; the warning for its next record, None if all is well.

        The warning is the same as long as the renamed file lies there: a sweep may rename it and die before the run.
        """
        try:
            self.read_record()
        except DamagedRecordError:
            with refusals_of_disk(self.path):
                (self.path / RECORD_FILE).replace(self.path / DAMAGED_FILE)
        try:
            self._read(DAMAGED_FILE)
        except DamagedRecordError as error:
            return f"record.json was damaged ({error.reason}): it is kept as {DAMAGED_FILE}, and the run was done again"
        return None

    def _read(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        try:
            record = record_schema.parse(_content(file, LARGEST_RECORD))
            self._require_curves(record.get("curves"))
            return record
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DamagedRecordError(file, str(error)) from None

    def _require_curves(self, written: dict[str, Any] | None) -> None:
        """`ValueError` if the curves are not those that the run has written, by its record."""
        file = self.path / CURVES_FILE
        if written is not None and record_schema.digest(file.read_bytes() if file.exists() else b"") != written:
            raise ValueError(f"{CURVES_FILE} is not what the run has written")

    def write_record(self, record: dict[str, Any]) -> None:
        """Say how the run ended: `status` is one of STATUSES, `config_hash` says of which config.

        A checksum over all of it is added, by which `read_record` finds out damage.
        """
        write_json(self.path / RECORD_FILE, record_schema.sealed(record))

    def finished(self, spec: RunSpec) -> bool:
        """Whether exactly this config has been run to its end here, by a record that is whole.

        Raises:
            UserError: as `belongs_to`.
        """
        record = self.whole_record() if self.belongs_to(spec) else None
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
            file = (self.path / ".lock").open("a+b", buffering=0)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().decode(errors="replace").strip() or "another process"
                raise BusyError(f"{self.path} is being written by {holder}") from None
            with suppress(OSError):  # a full disk: the lock holds without the name of its holder
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield

    def busy(self) -> bool:
        """Whether another process holds the folder at this moment."""
        try:
            with self.lock():
                return False
        except BusyError:
            return True


def _content(file: Path, largest: int) -> bytes:
    """All of a file; `ValueError` if it is too large to be one of ours."""
    with file.open("rb") as opened:
        content = opened.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest >> 20} MiB")
    return content

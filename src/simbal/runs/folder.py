"""A run's folder, `<output_dir>/<name>/<readable>-<hash8>/`: its files, the config it is of, and how the run ended.

    config.yaml    the resolved config and the chosen options; written first
    progress.json  where a running job is, for the live view; replaced while it runs
    metrics.jsonl  curves, one JSON object per logged step
    documents.json nats, tokens and bytes of the last validation by document
    record.json    how the run ended, with checksums of itself and of the two before; written last and atomically. One
                   that was found damaged is kept as record.json.damaged
    prune.json     a sweep's request that the run stop; only while it is being stopped
    checkpoints/   tensorboard/   train.log

No torch here: the sweep's parent process and `report.py` read folders without it.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from simbal.config.values import Shared
from simbal.errors import BusyError, UserError
from simbal.files.disk import refusals_of_disk, write_json, write_text
from simbal.files.locks import LockedError, is_locked, lock
from simbal.runs.record import digest, parse_record, sealed
from simbal.runs.spec import RunSpec

PRUNE_FILE, CONSOLE_FILE = "prune.json", "console.log"
CONFIG_FILE, CURVES_FILE, DOCUMENTS_FILE = "config.yaml", "metrics.jsonl", "documents.json"
RECORD_FILE, DAMAGED_FILE = "record.json", "record.json.damaged"
BLOCK = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)  # where a key without indentation begins
DELETED = ".deleted"  # a folder beside the runs; what is in it is no run any more


class DamagedRecordError(UserError):
    """A record is not what was written, so that the run counts as unfinished; `reason` says why in a few words."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file} is damaged ({reason}): give the command that made it again, to do the run again")
        self.reason = reason


class RunFolder:
    """Reads and writes one run's files."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock_file = path, path / ".lock"

    def read_spec(self) -> RunSpec:
        """Return the run that config.yaml describes; `UserError` if simbal did not write the file."""
        file = self.path / CONFIG_FILE
        try:
            saved = parse_config(file.read_bytes().decode())
            written = {key: value for key, value in saved.items() if key != "choices"}
            return RunSpec.saved(written, saved["choices"], self.path)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"{file} is not a config written by simbal: {error}") from None
        except (yaml.YAMLError, KeyError, TypeError, ValueError):
            raise UserError(f"{file} is not a config written by simbal") from None

    def belongs_to(self, spec: RunSpec) -> bool:
        """Whether this run has begun here; `UserError` if another one has."""
        with refusals_of_disk(self.path):
            if not (self.path / CONFIG_FILE).exists():
                return False
        if self.read_spec().hash != spec.hash:
            raise UserError(f"{self.path} belongs to another config: move it away, or choose another name=")
        return True

    def write_spec(self, spec: RunSpec) -> None:
        """Make the folder this run's own; refuse one that belongs to another config.

        Keys that cannot change the result get the values that they have now, as on another machine, unless there is a
        record, which has the checksum of the file.
        """
        if self.belongs_to(spec) and (self.path / RECORD_FILE).exists():
            return
        with refusals_of_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        saved = {"choices": spec.choices, **spec.written}
        write_text(self.path / CONFIG_FILE, config_text(saved))

    def read_record(self) -> dict[str, Any] | None:
        """Return record.json without its checksum, or None if the run has not ended.

        Raises:
            DamagedRecordError: the record is not what was written: cut short, changed or never a record.
            UserError: it cannot be read, or config.yaml was changed after it was written.
        """
        record = self._read(RECORD_FILE)
        if record and record.get("config") != self._digest(CONFIG_FILE):
            raise UserError(f"{self.path / CONFIG_FILE} is not what the run has written: put it back as it was")
        return record

    def whole_record(self) -> dict[str, Any] | None:
        """Return record.json as `read_record` does, but None also for one that is damaged."""
        with suppress(DamagedRecordError):
            return self.read_record()
        return None

    def set_aside_damaged_record(self) -> str | None:
        """Rename a damaged record, so that the run is done again.

        Returns:
            The warning for the run's next record; None if no record was damaged. It stays the same as long as the
            renamed file is there: a sweep may rename it and die before the run.
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
            record = parse_record(file.read_bytes())
            self._require_written(record)
            texts = {key: record[key] for key in ("choices", "definitions") if key in record}
            return record | {key: _shared(tuple(part.items())) for key, part in texts.items()}
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DamagedRecordError(file, str(error)) from None

    def _require_written(self, record: dict[str, Any]) -> None:
        """Raise `ValueError` unless curves and documents have the size and sha256 that the record says."""
        for key, file in (("curves", CURVES_FILE), ("documents", DOCUMENTS_FILE)):
            if (written := record.get(key)) is not None and self._digest(file) != written:
                raise ValueError(f"{file} is not what the run has written")

    def _digest(self, name: str) -> dict[str, Any]:
        """Return a file's size and sha256 (see `digest`); a file that is missing counts as empty."""
        with suppress(FileNotFoundError):
            return digest((self.path / name).read_bytes())
        return digest(b"")

    def write_record(self, record: dict[str, Any]) -> None:
        """Write how the run ended: `status` is one of STATUSES, `config_hash` says of which config.

        The checksum of config.yaml and one over all of the record are added, by which `read_record` notices damage.
        """
        of_config = {"config": self._digest(CONFIG_FILE)}
        write_json(self.path / RECORD_FILE, sealed(record | of_config))

    def finished(self, spec: RunSpec) -> bool:
        """Whether exactly this config has been run to its end here, by a record that is whole.

        Raises:
            UserError: another run has begun here, or config.yaml was changed.
        """
        record = self.whole_record() if self.belongs_to(spec) else None
        return record is not None and record["status"] == "finished" and record["config_hash"] == spec.hash

    def require_data(self, tokens: str) -> None:
        """Raise `UserError` for a finished run that was trained on other data than those with the fingerprint `tokens`.

        The config names its data but does not hold them: files can change, packages can be upgraded.
        """
        record = self.read_record()
        if record is not None and record["status"] == "finished":
            self.require_same_data(record["data"]["tokens"], tokens)

    def require_same_data(self, before: str, now: str) -> None:
        """Raise `UserError` unless the data that a finished run was trained on are those that there are now."""
        if before != now:
            raise UserError(
                f"{self.path} was finished on other data (tokens {before[:12]}, now {now[:12]}): move it away, or "
                "choose another name="
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process; `BusyError` if another one has it."""
        with refusals_of_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                with refusals_of_disk(self.path):
                    held.enter_context(lock(self._lock_file))
            except LockedError as taken:
                raise BusyError(f"{self.path} is being written by {taken}") from None
            yield

    def looks_busy(self) -> bool:
        """Whether another process seems to hold the folder: nothing is written, and none is kept from it."""
        return is_locked(self._lock_file)


@lru_cache(maxsize=256)
def _shared(texts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return texts by name, the same object for all of thousands of runs that have the same."""
    return dict(texts)


def is_run(path: Path) -> bool:
    """Whether a folder has what a run has written; whether it is whole, its reader finds out."""
    return any((path / file).exists() for file in (CONFIG_FILE, RECORD_FILE))


def parse_config(text: str) -> dict[str, Any]:
    """Return the mapping that the YAML `text` holds.

    Blocks of lines under an unindented key are cached, as the configs of a thousand runs have few different ones.

    Raises:
        yaml.YAMLError: it is no YAML, or has Python's own tags.
        TypeError, ValueError: it is no mapping.
    """
    first, *blocks = BLOCK.split(text)
    if first or not blocks:
        return dict(yaml.load(text, yaml.CSafeLoader))
    whole: dict[str, Any] = {}
    for block in blocks:
        whole |= _block(block)
    return whole


def config_text(mapping: dict[str, Any]) -> str:
    """Return a config as the YAML that `parse_config` reads."""
    return yaml.dump(mapping, Dumper=_WrittenOut, sort_keys=False)


class _WrittenOut(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_WrittenOut.add_representer(Shared, _WrittenOut.represent_dict)


@lru_cache(maxsize=4096)
def _block(text: str) -> dict[str, Any]:
    block = dict(yaml.load(text, yaml.CSafeLoader))
    return {key: Shared(value) if isinstance(value, dict) else value for key, value in block.items()}


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the runs that paths name: folders of runs, and all runs in outputs/<name>, each once.

    Raises:
        UserError: one is a link, no folder, or neither a run nor a folder of runs that simbal has written.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}")
        runs = [path] if is_run(path) else sorted(child for child in path.iterdir() if child.is_dir() and is_run(child))
        if not runs:
            raise UserError(f"{path} is no run, and holds none: give outputs/<name>/<run>, or outputs/<name>")
        for run in runs:
            if run.is_symlink():
                raise UserError(f"{run} is a link: give the folder that it leads to")
            RunFolder(run).read_spec()  # another program's folder can have a config.yaml too
            found.setdefault(run.resolve(), run)
    return [*found.values()]


def refuse_busy(runs: Iterable[Path]) -> None:
    """Raise `BusyError` if another process is at one of the runs."""
    for run in runs:
        if RunFolder(run).looks_busy():
            raise BusyError(f"{run} is being trained: wait for it, or stop it first")


def delete_runs(runs: Sequence[Path]) -> None:
    """Delete folders of runs, and what an earlier deletion beside them has left; links are not followed.

    Each is renamed away before it is removed, so that a kill leaves no half of a run.

    Raises:
        BusyError: before anything is deleted, if one is being trained; it names the run.
        UserError: the disk refuses.
    """
    refuse_busy(runs)
    aside = {run: run.absolute().parent / DELETED for run in runs}
    for run, folder in aside.items():
        with refusals_of_disk(folder.parent):
            if folder.is_symlink():
                raise UserError(f"{folder} is a link: delete it")
            folder.mkdir(exist_ok=True)
            with RunFolder(run).lock():
                run.absolute().rename(folder / f"{run.absolute().name}-{os.getpid()}")
        _remove(folder)
    for folder in {*aside.values()}:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, which another process may be removing too."""
    while folder.exists():
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be removed: {error.strerror}; what is in it is no run any more") from None

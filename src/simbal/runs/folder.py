"""A run folder, `<output_dir>/<name>/<readable>-<hash8>/`: its config, its record and its lock.

    config.yaml    the resolved config and the selected options; written first
    progress.json  progress of a running job, for the live view
    metrics.jsonl  curves, one JSON object per logged step
    documents.json loss and tokens by document in the last validation
    record.json    how the run ended, with checksums of the files above; written last and atomically
                   (a damaged one is kept as record.json.damaged)
    prune.json     a sweep's request to stop the run
    checkpoints/   tensorboard/   train.log

No torch here: the sweep's parent process and `report.py` read folders without it.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from simbal.errors import BusyError, UserError
from simbal.runs.atomic import explain_write_errors, is_locked, lock, write_json, write_text
from simbal.runs.record import digest, parse_record, with_checksum
from simbal.runs.spec import RunSpec

PRUNE_FILE, CONSOLE_FILE = "prune.json", "console.log"
CONFIG_FILE, CURVES_FILE, DOCUMENTS_FILE = "config.yaml", "metrics.jsonl", "documents.json"
RECORD_FILE, DAMAGED_FILE = "record.json", "record.json.damaged"
TOP_LEVEL_KEY = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)


class DamagedRecordError(UserError):
    """record.json, or a file whose checksum it contains, is damaged, so the run counts as unfinished."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file} is damaged ({reason}): rerun its command to repeat the run")
        self.reason = reason


class RunFolder:
    """Reads and writes the config and the record of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock_file = path, path / ".lock"

    def read_spec(self) -> RunSpec:
        """Return the run that config.yaml describes; `UserError` if simbal did not write the file."""
        file = self.path / CONFIG_FILE
        try:
            written = parse_config(file.read_bytes().decode())
            choices = written.pop("choices")
            return RunSpec.from_saved(written, choices, self.path)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"{file} is not a config written by simbal: {error}") from None
        except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError):
            raise UserError(f"{file} is not a config written by simbal") from None

    def belongs_to(self, spec: RunSpec) -> bool:
        """Return whether the folder already contains this run; `UserError` if it belongs to another config."""
        with explain_write_errors(self.path):
            if not (self.path / CONFIG_FILE).exists():
                return False
        if self.read_spec().hash != spec.hash:
            raise UserError(f"{self.path} belongs to another config: move it away, or choose another name=")
        return True

    def write_spec(self, spec: RunSpec) -> None:
        """Write config.yaml; `UserError` if the folder belongs to another config.

        Keys that cannot change the result get their current values, except after the run has ended: the record has the
        checksum of the file.
        """
        if self.belongs_to(spec) and (self.path / RECORD_FILE).exists():
            return
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / CONFIG_FILE, config_text({"choices": spec.choices, **spec.written}))

    def read_record(self) -> dict[str, Any] | None:
        """Return the content of record.json, or None if the run has not ended.

        Raises:
            DamagedRecordError: record.json, metrics.jsonl or documents.json was changed or truncated.
            UserError: the record cannot be read, or config.yaml was changed later.
        """
        file = self.path / RECORD_FILE
        try:
            record = parse_record(file.read_bytes())
            for key, name in (("curves", CURVES_FILE), ("documents", DOCUMENTS_FILE)):
                if record.get(key) is not None and record[key] != self._digest(name):
                    raise ValueError(f"the checksum of {name} does not match")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DamagedRecordError(file, str(error)) from None
        if record.get("config") != self._digest(CONFIG_FILE):
            raise UserError(f"{self.path / CONFIG_FILE} was changed after the run: restore it")
        return record

    def valid_record(self) -> dict[str, Any] | None:
        """Return the result of `read_record`, or None for a damaged record."""
        with suppress(DamagedRecordError):
            return self.read_record()
        return None

    def set_aside_damaged_record(self) -> str | None:
        """Rename a damaged record, so that the run is repeated.

        Returns:
            A warning for the next record of the run while the renamed file exists, else None.
        """
        try:
            self.read_record()
        except DamagedRecordError:
            with explain_write_errors(self.path):
                (self.path / RECORD_FILE).replace(self.path / DAMAGED_FILE)
        if (self.path / DAMAGED_FILE).exists():
            return f"record.json was damaged: it is kept as {DAMAGED_FILE}, and the run was repeated"
        return None

    def write_record(self, record: dict[str, Any]) -> None:
        """Write how the run ended, with a checksum over the record and the checksum of config.yaml."""
        write_json(self.path / RECORD_FILE, with_checksum({**record, "config": self._digest(CONFIG_FILE)}))

    def _digest(self, name: str) -> dict[str, Any]:
        """Return the size and sha256 of a file; a missing file counts as empty."""
        with suppress(FileNotFoundError):
            return digest((self.path / name).read_bytes())
        return digest(b"")

    def is_finished(self, spec: RunSpec) -> bool:
        """Return whether this config was trained to the end in this folder.

        Raises:
            UserError: the folder belongs to another config, or config.yaml was changed.
        """
        record = self.valid_record() if self.belongs_to(spec) else None
        return record is not None and record["status"] == "finished" and record["config_hash"] == spec.hash

    def require_same_data(self, before: str, now: str) -> None:
        """Raise `UserError` unless the data of a finished run have the fingerprint of the current data.

        The config names its data but does not contain them: files can change and packages can be upgraded.
        """
        if before != now:
            tokens = f"tokens {before[:12]}, now {now[:12]}"
            raise UserError(f"{self.path} was trained on other data ({tokens}): move it away, or choose another name=")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process; `BusyError` if another process has locked it."""
        with ExitStack() as stack:
            with explain_write_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(self._lock_file))
            yield

    def is_locked(self) -> bool:
        """Return whether another process has locked the folder, without writing to it."""
        return is_locked(self._lock_file)


def is_run(path: Path) -> bool:
    """Return whether a folder contains a run's config or record."""
    return any((path / file).exists() for file in (CONFIG_FILE, RECORD_FILE))


def parse_config(text: str) -> dict[str, Any]:
    """Return the mapping of a YAML text; blocks are cached, because the configs of a sweep share most of them.

    Raises:
        yaml.YAMLError: the text is not YAML, or has Python's own tags.
        TypeError, ValueError: it is not a mapping.
    """
    first, *blocks = TOP_LEVEL_KEY.split(text)
    if first or not blocks:
        return dict(yaml.load(text, yaml.CSafeLoader))
    config: dict[str, Any] = {}
    for block in blocks:
        config |= _parse_block(block)
    return config


@lru_cache(maxsize=4096)
def _parse_block(text: str) -> dict[str, Any]:
    return dict(yaml.load(text, yaml.CSafeLoader))


def config_text(mapping: dict[str, Any]) -> str:
    """Return a config as YAML without anchors and aliases."""
    return yaml.dump(mapping, Dumper=_WithoutAliases, sort_keys=False)


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in outputs/<name>, sorted by name; none if there is no such folder."""
    return sorted(filter(is_run, folder.glob("*")), key=lambda path: path.name)


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among `paths`, and all run folders inside folders such as outputs/<name>, each once.

    Raises:
        UserError: a path does not exist, or there is no run at all.
    """
    unique: dict[Path, Path] = {}
    paths = [*paths]
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        for run in [path] if is_run(path) else runs_in(path):
            if run.is_symlink():
                raise UserError(f"{run} is a symbolic link: use the folder that it points to")
            RunFolder(run).read_spec()  # another program's folder can contain a config.yaml too
            unique.setdefault(run.resolve(), run)
    if not unique:
        listed = ", ".join(map(str, paths))
        raise UserError(f"{listed} contains no run: use outputs/<name>/<run>, or outputs/<name>")
    return [*unique.values()]


def delete_runs(runs: Sequence[Path]) -> None:
    """Delete run folders without following links.

    Raises:
        BusyError: before anything is deleted, if a run is being trained.
        UserError: the disk rejects it.
    """
    for run in runs:
        if RunFolder(run).is_locked():
            raise BusyError(f"{run} is being trained: wait for it, or stop it first")
    for run in runs:
        with explain_write_errors(run.parent), RunFolder(run).lock():
            shutil.rmtree(run)

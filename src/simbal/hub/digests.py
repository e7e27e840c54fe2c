"""The checksums in simbal.json of the files beside it, by which damage to an export is noticed."""

from hashlib import file_digest
from pathlib import Path

from simbal.errors import UserError
from simbal.host.weight_files import SINGLE, read_json

CONFIG, FACTS = "config.json", "simbal.json"
DIGESTS = "sha256"  # a key of simbal.json: by the name of a file


def file_sha256(file: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def require_written(folder: Path) -> None:
    """Raise `UserError` unless config and weights are those that an export has written.

    A folder without simbal.json is somebody else's, and is read as such.
    """
    facts = folder / FACTS
    if not facts.exists():
        return
    stated = read_json(facts).get(DIGESTS)
    if not isinstance(stated, dict):
        raise UserError(f"{facts} has no checksums: export the run again")
    for name in (CONFIG, SINGLE):
        file = folder / name
        try:
            found = file_sha256(file)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        if stated.get(name) != found:
            raise UserError(f"{file} is damaged: it is not what the export has written, by {FACTS}; export it again")

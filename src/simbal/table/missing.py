"""The runs that the last sweep in a folder was to make and never started."""

from collections.abc import Collection
from pathlib import Path

from simbal import strict_json
from simbal.errors import UserError
from simbal.printable import printable


def never_started(folder: Path, started: Collection[str]) -> dict[str, str]:
    """Labels by folder name of the runs in sweep.json that are not in `started`; none if there is no such file.

    Raises:
        UserError: the file is broken.
    """
    file = folder / "sweep.json"
    if not file.exists():
        return {}
    try:
        runs = strict_json.parse(file.read_bytes())["runs"]
        if all(isinstance(label, str) for label in runs.values()):
            return {printable(name): printable(label) for name, label in runs.items() if name not in started}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{file} is broken: delete it; the runs in {folder} need it no more")

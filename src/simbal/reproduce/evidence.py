"""What is kept of a study: its table, the numbers of its figures, the figures, and where all of it comes from."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from simbal.reproduce.analyses import write_analyses
from simbal.reproduce.drawing import draw, write_curves
from simbal.reproduce.study import Study
from simbal.run_folder import write_json, write_text
from simbal.table.collect import Run, collect
from simbal.table.export import as_json, markdown, tidy_csv
from simbal.table.metric import choose, own_columns
from simbal.table.missing import never_started
from simbal.table.table import build

ENVIRONMENT = ("versions", "device", "precision", "threads", "backend", "data")  # of a run's record


def write(study: Study, command: str, folder: Path) -> None:
    """table.md, table.csv, table.json, analyses.md, analyses.csv, curves.csv, <figure>.svg and origin.json.

    What people wrote in the folder stays.

    Raises:
        UserError: as `collect`, `choose`, `build` and `write_analyses` do.
    """
    runs = collect(study.folder)
    finished = [run for run in runs if run.finished]
    columns = study.columns or own_columns(finished)
    metrics = None if columns is None else choose(columns, finished)
    missing = never_started(study.folder, {run.path.name for run in runs})
    table = build(study.name, runs, None, metrics, False, missing)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.csv", tidy_csv(table))
    write_json(folder / "table.json", as_json(table))
    write_analyses([row.arm for row in table.rows], folder)
    write_curves(table, folder)
    draw(folder)
    write_json(folder / "origin.json", origin(study, command, runs))


def origin(study: Study, command: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The commands, and of the finished runs: the commits, the environments, tokens and seconds.

    `seconds` are those of training and validation, summed over the runs, of which several may have run at once; of a
    run that was broken off they are those of its last process.
    """
    records = [run.result for run in runs if run.finished]
    return {
        "command": command,
        "analyses": study.analyses,
        "runs": len(runs),
        "finished": len(records),
        "code": _different(record["code"] for record in records),
        "environment": _different(
            _without_folders({key: record.get(key) for key in ENVIRONMENT}) for record in records
        ),
        "tokens": sum(record["tokens"] for record in records),
        "seconds": round(sum(record["seconds"] for record in records)),
        "first_started": min((record["started"] for record in records), default=None),
        "last_ended": max((record["ended"] for record in records), default=None),
    }


def _without_folders(value: Any) -> Any:
    """Files by their names alone: where they lay on one machine says nothing on another."""
    if isinstance(value, dict):
        return {key: _without_folders(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _different(values: Iterable[Any]) -> list[Any]:
    """Each once, in the order of their coming."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found

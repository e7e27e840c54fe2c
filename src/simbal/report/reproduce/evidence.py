"""The studies of a scale, and what is kept of each: table, rows, analyses, numbers of the figures, figures, origin."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simbal.analysis.shared.finding import numbers_of
from simbal.errors import UserError
from simbal.files.disk import write_json, write_text
from simbal.report.arms import Arm
from simbal.report.collect import Run, collect
from simbal.report.columns import ABSENT, choose, named_by_runs, refuse_unlike
from simbal.report.export import as_json, escape, markdown, markdown_table, tidy_csv
from simbal.report.reproduce.drawing import curves_of, draw, write_curves
from simbal.report.reproduce.rows import ROWS, rows_csv
from simbal.report.sections import mean_cell
from simbal.report.statistics import Summary, summarize
from simbal.report.table import LastSweep, build

KEYS = {"command", "analyses", "baseline", "columns"}
ENVIRONMENT = ("versions", "device", "precision", "threads", "backend", "data")  # keys of a run's record
HEADINGS = ["analysis", "number", "layer", "arm", "mean", "sd", "n"]


@dataclass(frozen=True)
class Study:
    """A sweep to reproduce, and what is made of it."""

    name: str
    overrides: list[str]  # arguments of train.py -m
    analyses: list[str]  # to be done on every finished run
    columns: list[str] | None  # columns of its table; None: those that the runs' own configs name
    folder: Path  # the folder of its runs
    baseline: str | None = None  # of its table; None: the same


@dataclass(frozen=True)
class Found:
    """A number of an analysis in one arm, of the whole model or of a layer."""

    analysis: str
    number: str
    layer: int | None
    arm: str
    summary: Summary

    @property
    def text(self) -> str:
        """`mean ± sd` to four digits."""
        return mean_cell("{:.4g}", self.summary).line


def studies(config: dict[str, Any]) -> list[Study]:
    """Return the studies of `config["scale"]` that are asked for.

    Raises:
        UserError: `only` names none of them, or one has a key that is not known.
    """
    scale, only = config["scale"], config["only"]
    if only is not None and not isinstance(only, list):
        raise UserError(f"only={only} must be null or a list: write only=[{only}]")
    known = [*scale["studies"], *scale["budgets"], *scale["analyses"]]
    unknown = [name for name in only or [] if name not in known]
    if unknown:
        raise UserError(f"only={unknown[0]} is no study of scale={scale['name']}: there are {', '.join(known)}")
    return [_study(name, keys, config) for name, keys in scale["studies"].items() if only is None or name in only]


def analyses(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the overrides of evaluate.py for the analyses that need no run, by name."""
    only = config["only"]
    return {name: keys for name, keys in config["scale"]["analyses"].items() if only is None or name in only}


def write(study: Study, command: str, folder: Path) -> None:
    """Write a study's tables, rows.csv, analyses, curves.csv, figures and origin.json to `folder`.

    Other files in the folder, which people wrote, stay.

    Raises:
        UserError: as `collect`, `choose`, `build` and `write_analyses` do.
    """
    runs = collect(study.folder)
    finished = [run for run in runs if run.finished]
    columns = study.columns or named_by_runs(finished)
    metrics = None if columns is None else choose(columns, finished)
    missing = LastSweep.of(study.folder).never_started({run.path.name for run in runs})
    table = build(study.name, runs, study.baseline, metrics, False, missing)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.csv", tidy_csv(table))
    write_json(folder / "table.json", as_json(table))
    write_text(folder / ROWS, rows_csv(table.rows))
    write_analyses([row.arm for row in table.rows], folder)
    write_curves(curves_of(table), folder)
    draw(folder)
    write_json(folder / "origin.json", origin(study, command, runs))


def origin(study: Study, command: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the commands of a study, and the commits, environments, tokens and seconds of its finished runs.

    `seconds` are those of training and validation, summed over the runs, of which several may have run at once; for a
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


def spent(results: Path, key: str, names: Collection[str] | None = None) -> dict[str, float]:
    """Return a number of origin.json, such as `tokens` or `seconds`, by study, for those of `names` that have it.

    Raises:
        UserError: a file is not what `write` has written.
    """
    files = [file for file in sorted(results.glob("*/origin.json")) if names is None or file.parent.name in names]
    try:
        return {file.parent.name: json.loads(file.read_bytes())[key] for file in files}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"an origin.json in {results} does not say {key}: reproduce its study") from None


def write_analyses(arms: Sequence[Arm], folder: Path) -> None:
    """Write analyses.csv and analyses.md; nothing if no run was analysed.

    Raises:
        UserError: an analysis was done with other settings in one run than in another.
    """
    analyses = {name: analysis for arm in arms for run in arm.runs for name, analysis in run.analyses.items()}
    refuse_unlike(analyses, [run for arm in arms for run in arm.runs])
    found = [each for name in sorted(analyses) for each in _found(arms, name)]
    if not found:
        return
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for each in found:
        summary = each.summary
        lines.writerow([each.analysis, each.number, each.layer, each.arm, summary.mean, summary.sd, summary.n])
    write_text(folder / "analyses.csv", text.getvalue())
    precisions = {name: _precisions(arms, name) for name in analyses}
    write_text(folder / "analyses.md", _markdown(found, analyses, precisions))


def _study(name: str, keys: dict[str, Any], config: dict[str, Any]) -> Study:
    if more := keys.keys() - KEYS:
        raise UserError(f"scale.studies.{name} has a key {min(more)}: there are {', '.join(sorted(KEYS))}")
    run_name = f"{config['scale']['name']}-{name}"
    overrides = [*keys["command"], f"name={run_name}", f"output_dir={config['output_dir']}"]
    folder = Path(config["output_dir"], run_name)
    return Study(name, overrides, keys.get("analyses", []), keys.get("columns"), folder, keys.get("baseline"))


def _without_folders(value: Any) -> Any:
    """Return a value with files by their names alone: their place on one machine says nothing on another."""
    if isinstance(value, dict):
        return {key: _without_folders(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _different(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in the order of their coming."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _found(arms: Sequence[Arm], name: str) -> Iterator[Found]:
    """Yield the numbers of an analysis: by number, the model before its layers, then by layer, then by arm."""
    values: dict[tuple[str, int | None], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for arm in arms:
        for analysis in (run.analyses[name] for run in arm.runs if name in run.analyses):
            for number, layer, value in numbers_of(analysis):
                values[number, layer][arm.name].append(value)
    for (number, layer), by_arm in values.items():
        for arm_name, of_seeds in by_arm.items():
            if summary := summarize(of_seeds):
                yield Found(name, number, layer, arm_name, summary)


def _precisions(arms: Sequence[Arm], name: str) -> list[str]:
    """Return a sentence for each pair of precisions that an analysis and the training before it did not share."""
    done = [run.analyses[name].get("precision") for arm in arms for run in arm.runs if name in run.analyses]
    pairs = _different([(each.get("trained"), each.get("analysed")) for each in done if isinstance(each, dict)])
    return [f"trained in {trained}, analysed in {analysed}" for trained, analysed in pairs if trained != analysed]


def _markdown(
    found: Sequence[Found], analyses: Mapping[str, Mapping[str, Any]], precisions: Mapping[str, Sequence[str]]
) -> str:
    parts = ["# Analyses: mean ± standard deviation over seeds"]
    for name in sorted(analyses):
        here = [each for each in found if each.analysis == name]
        arms = [*dict.fromkeys(each.arm for each in here)]
        model, layers = [each for each in here if each.layer is None], [each for each in here if each.layer is not None]
        rows = _pivot(model, lambda each: (each.number,), lambda each: each.arm, arms)
        parts += [f"## {escape(name)}", markdown_table(["", *arms], rows)]
        if layers:
            depth = range(1 + max(each.layer or 0 for each in layers))
            rows = _pivot(layers, lambda each: (each.number, each.arm), lambda each: each.layer, depth)
            parts.append(markdown_table(["", "arm", *(f"layer {i}" for i in depth)], rows))
        texts = analyses[name]["definition"].items()
        notes = [*(f"{number}: {text}" for number, text in texts), *precisions[name]]
        parts.append("\n".join(f"- {escape(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _pivot(
    found: Sequence[Found],
    row: Callable[[Found], tuple[str, ...]],
    column: Callable[[Found], Any],
    columns: Sequence[Any],
) -> Iterator[list[str]]:
    """Yield one row for each value of `row`, with one cell for each of `columns`."""
    cells = {(row(each), column(each)): each.text for each in found}
    for heading in dict.fromkeys(map(row, found)):
        yield [*heading, *(cells.get((heading, place), ABSENT) for place in columns)]

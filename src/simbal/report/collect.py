"""Reads the runs of a sweep from their folders, with their curves, and refuses those that do not fit in one table."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

from simbal.analysis.result import read_analysis
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS, SPEED
from simbal.runs.curves import DocumentSums, curve, document_sums
from simbal.runs.folder import DamagedRecordError, RunFolder, is_run
from simbal.runs.spec import RunSpec

PLACE = re.compile("<[^<>]*>")  # in the name of a definition, for any text
KNOWN = {metric.name: metric.definition for metric in NUMBERS}  # for what an analysis does not define itself


@dataclass(frozen=True)
class Run:
    """A run's folder as it was read: its spec, and how it ended."""

    path: Path
    spec: RunSpec
    record: dict[str, Any] | None  # None: unfinished, or damaged
    analyses: dict[str, dict[str, Any]]  # results of evaluate.py, by name
    damage: str = ""  # says which record is damaged and what to do

    @property
    def finished(self) -> bool:
        """Whether it came to its end, so that its numbers count."""
        return self.record is not None and self.record["status"] == "finished"

    @cached_property
    def seed(self) -> int:
        """The seed of its data order and of its initial weights."""
        return int(self.spec.config.seed)

    @property
    def result(self) -> dict[str, Any]:
        """The record of a finished run."""
        assert self.record is not None and self.finished, self.path  # noqa: PT018
        return self.record

    @cached_property
    def analysed(self) -> dict[str, float | None]:
        """The numbers of its analyses, as `redundancy.min_pes`; the slash is for the run's own, such as `val/ppl`."""
        return numbers_of_analyses(self.analyses)

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """All numbers of a finished run, by key; those of its analyses count before its own."""
        return {**self.result["metrics"], SPEED.key: self.result[SPEED.key], **self.analysed}

    @property
    def definitions(self) -> dict[str, str]:
        """The definitions of its numbers, by the same names."""
        return dict(self.result["definitions"]) | definitions_of_analyses(self.analyses)

    @cached_property
    def loss_curve(self) -> list[tuple[int, float]]:
        """Validation loss by training tokens, read when it is first asked for; `UserError` if it is broken."""
        return curve(self.path, "val/loss")

    @cached_property
    def documents(self) -> DocumentSums | None:
        """What was measured of each validation document, read when it is first asked for; `UserError` if broken."""
        return document_sums(self.path)

    def value(self, metric: str) -> float | None:
        """Return a number of a finished run; None where it is missing or has no meaning, as load in a dense model."""
        return self.numbers.get(metric)


def numbers_of_analyses(analyses: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the numbers of analyses, as `redundancy.min_pes`."""
    return {f"{name}.{metric}": value for name, done in analyses.items() for metric, value in done["metrics"].items()}


def definitions_of_analyses(analyses: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return the definitions of the same numbers."""
    texts: dict[str, str] = {}
    for name, analysis in analyses.items():
        own = {metric: _text(metric, analysis) or KNOWN.get(metric) for metric in analysis["metrics"]}
        texts |= {f"{name}.{metric}": text for metric, text in own.items() if text}
    return texts


def collect(folder: Path) -> list[Run]:
    """Return every run in outputs/<name>, by folder name; one whose record is damaged counts as unfinished.

    Raises:
        UserError: if there is none, if another file is broken or belongs to another config, if a folder is a copy of
            another, or if two finished runs saw different data, trained for different numbers of steps or measured by
            different definitions.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = sorted(filter(is_run, folder.iterdir()), key=lambda path: path.name)
    if not paths:
        raise UserError(f"{folder} holds no runs: give outputs/<name>, whose runs python train.py -m name=... starts")
    runs = [*map(read_run, paths)]
    _refuse_copies(runs)
    _refuse_unlike([run for run in runs if run.finished])
    return runs


def _text(metric: str, analysis: dict[str, Any]) -> str | None:
    """Return the most specific definition of a metric: `ppl_se` is `<number>_se`, where nothing is named ppl_se."""
    fits = [name for name in analysis["definition"] if _fits(name, metric)]
    best = max(fits, key=lambda name: (name == metric, len(name)), default=None)
    return best and analysis["definition"][best]


def _fits(name: str, metric: str) -> bool:
    """Whether `metric` is `name` with something in place of each `<...>`; fnmatch needs linear time for any two."""
    return fnmatchcase(metric, "?*".join(map(escape, PLACE.split(name))))


def read_run(path: Path) -> Run:
    """Return the run in a folder; one whose record is damaged counts as unfinished.

    Raises:
        UserError: another file is broken or belongs to another config.
    """
    folder = RunFolder(path)
    if not (path / "config.yaml").exists():
        raise UserError(f"{path} has a record.json but no config.yaml: move the folder away")
    spec, record, damage = folder.read_spec(), None, ""
    try:
        record = folder.read_record()
    except DamagedRecordError as error:
        damage = str(error)
    if record is not None and record["config_hash"] != spec.hash:
        raise UserError(f"{path / 'record.json'} was written for another config than {path / 'config.yaml'}")
    return Run(path, spec, record, read_analyses(path / "analysis"), damage)


def read_analyses(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the analyses that have numbers, by name; `UserError` if one is broken."""
    files = sorted(folder.glob("*.json")) if folder.exists() else []  # most have none, which glob is slow to find
    analyses = {file.stem: read_analysis(file) for file in files}
    return {name: analysis for name, analysis in analyses.items() if analysis and analysis.get("metrics")}


def _refuse_copies(runs: Sequence[Run]) -> None:
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.spec.hash, run)
        if other is not run:
            raise UserError(f"{other.path} and {run.path} are one run, which must not count twice: delete one")


def _refuse_unlike(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        if reasons := unlike(runs[0], run):
            raise UserError(
                f"{runs[0].path} and {run.path} cannot stand in one table: {reasons[0]}; give one of them another name="
            )


def unlike(first: Run, second: Run) -> list[str]:
    """Return why the numbers of two finished runs cannot be compared, each reason in a few words; none if they can."""
    reasons = []
    ours, theirs = first.result, second.result
    if ours["data"]["tokens"] != theirs["data"]["tokens"]:
        reasons.append(_difference_in("data", ours, theirs))
    if ours["steps"] != theirs["steps"]:
        reasons.append(f"the first was trained for {ours['steps']:,} steps and the second for {theirs['steps']:,}")
    both = ours["definitions"].keys() & theirs["definitions"]  # a dense model may define no load
    if any(ours["definitions"][key] != theirs["definitions"][key] for key in both):
        reasons.append(_difference_in("definitions", ours, theirs))
    return reasons


def _difference_in(part: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return one differing field of a part of two records.

    A version or a source is rather named than a fingerprint, and a changed field rather than a missing one.
    """
    ours, theirs = (flatten({part: record[part]}) for record in (first, second))
    differing = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    key = min(differing, key=lambda key: (key in ("data.text", "data.tokens"), key not in ours or key not in theirs))
    return f"{key} is {ours.get(key)!r} in the first and {theirs.get(key)!r} in the second"

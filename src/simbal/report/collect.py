"""Read the runs and measured models of a folder, and refuse runs that cannot be compared in one table."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from simbal.analysis.result import is_measured_model, read_analysis, read_model
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS, SPEED
from simbal.runs.curves import DocumentSums, curve, document_sums, rows
from simbal.runs.folder import DamagedRecordError, RunFolder, runs_in
from simbal.runs.spec import SWEEP_FILE, RunSpec

KNOWN = {metric.name: metric.definition for metric in NUMBERS}  # for numbers that an analysis does not define


@dataclass(frozen=True)
class Measured:
    """A run or a Hugging Face model: its folder, and the results of its analyses by name."""

    path: Path
    analyses: dict[str, dict[str, Any]]

    @cached_property
    def analyzed(self) -> dict[str, float | None]:
        """The numbers of its analyses by key, such as `redundancy.min_pes`."""
        return {
            f"{name}.{key}": number for name, one in self.analyses.items() for key, number in one["metrics"].items()
        }

    @property
    def numbers(self) -> dict[str, float | None]:
        """All of its numbers by key."""
        return self.analyzed

    @property
    def definitions(self) -> dict[str, str]:
        """The definitions of its numbers by key."""
        texts = {}
        for name, analysis in self.analyses.items():
            for metric in analysis["metrics"]:
                if text := _definition(metric, analysis["definition"]):
                    texts[f"{name}.{metric}"] = text
        return texts

    def value(self, key: str) -> float | None:
        """Return a number; None if it is missing or undefined, such as the load of a dense model."""
        return self.numbers.get(key)


@dataclass(frozen=True)
class MeasuredModel(Measured):
    """A Hugging Face model that evaluate.py has measured: a row of the table without seeds."""

    facts: dict[str, Any]  # the content of model.json

    @property
    def name(self) -> str:
        """The name of its row."""
        return self.path.name


@dataclass(frozen=True)
class Run(Measured):
    """A run folder: its spec and its record."""

    spec: RunSpec
    record: dict[str, Any] | None  # None: unfinished or damaged
    damage: str = ""  # message about a damaged record

    @property
    def finished(self) -> bool:
        """Whether the run has finished. Numbers of other runs are not used."""
        return self.record is not None and self.record["status"] == "finished"

    @cached_property
    def seed(self) -> int:
        """The seed of its data order and initial weights."""
        return int(self.spec.config.seed)

    @property
    def result(self) -> dict[str, Any]:
        """The record of a finished run."""
        assert self.record is not None and self.finished, self.path  # noqa: PT018
        return self.record

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """All numbers of a finished run by key, such as `val/ppl` and `redundancy.min_pes`."""
        return {**self.result["metrics"], SPEED.key: self.result[SPEED.key], **self.analyzed}

    @property
    def definitions(self) -> dict[str, str]:
        """The definitions of its numbers by key."""
        return dict(self.result["definitions"]) | super().definitions

    @cached_property
    def untrained(self) -> str:
        """Why no conclusions can be drawn from this finished run; empty if it is trained."""
        steps, warmup, loss = self.result["steps"], self.spec.config.optim.warmup_steps, self.value("val/loss")
        if steps <= warmup:
            return f"{steps:,} steps do not exceed the warm-up of {warmup:,}: the peak learning rate is never reached"
        unigram = self.ngram_losses.get(1)
        if unigram is not None and loss is not None and loss > unigram:
            return f"the validation loss is above the loss of a unigram model of the text ({unigram:.3f} nats)"
        return ""

    @property
    def ngram_losses(self) -> dict[int, float]:
        """Validation loss of n-gram models of the same text by their order; empty if they were not computed."""
        return {int(order): loss for order, loss in self.result["data"].get("ngrams", {}).get("losses", {}).items()}

    @cached_property
    def loss_curve(self) -> list[tuple[int, float]]:
        """Validation loss by training tokens; `UserError` if the file is broken."""
        return curve(self.path, "val/loss")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, sorted by tokens; `UserError` if the file is broken."""
        return sorted(rows(self.path), key=lambda row: row["tokens"])

    @cached_property
    def documents(self) -> DocumentSums | None:
        """The sums of each validation document; `UserError` if the file is broken."""
        return document_sums(self.path)


def collect(folder: Path) -> list[Run]:
    """Return every run in outputs/<name>, sorted by folder name. A run with a damaged record counts as unfinished.

    Raises:
        UserError: the folder contains no runs, a config is damaged, a run is a copy of another, or two finished runs
            differ in data, number of steps or definitions.
    """
    _require_folder(folder)
    paths = runs_in(folder)
    if not paths:
        raise UserError(
            f"{folder} contains no runs: give the outputs/<name> that python train.py -m name=<name> writes"
        )
    runs = [read_run(path) for path in paths]
    by_hash: dict[str, Run] = {}
    for run in runs:
        if (other := by_hash.setdefault(run.spec.hash, run)) is not run:
            raise UserError(f"{other.path} and {run.path} are copies of the same run: delete one")
    first, *others = [run for run in runs if run.finished] or runs[:1]
    for run in others:
        if reason := difference_in_setting(first, run):
            raise UserError(f"{first.path} and {run.path} cannot be compared: {reason}; use different names (name=)")
    return runs


def read_run(path: Path) -> Run:
    """Return the run in a folder; `UserError` if its config is damaged or missing."""
    folder = RunFolder(path)
    spec, record, damage = folder.read_spec(), None, ""
    try:
        record = folder.read_record()
    except DamagedRecordError as error:
        damage = str(error)
    return Run(path, read_analyses(path / "analysis"), spec, record, damage)


def read_analyses(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the analyses with numbers in a folder, by name; `UserError` if a file is damaged."""
    analyses = {file.stem: read_analysis(file) for file in sorted(folder.glob("*.json"))}
    return {name: analysis for name, analysis in analyses.items() if analysis and analysis.get("metrics")}


def measured_models(folder: Path) -> list[MeasuredModel]:
    """Return the Hugging Face models with results in a folder, sorted by name; `UserError` if a file is damaged."""
    _require_folder(folder)
    paths = [path for path in sorted(folder.iterdir()) if path.is_dir() and is_measured_model(path)]
    return [MeasuredModel(path, read_analyses(path / "analysis"), read_model(path)) for path in paths]


def last_sweep(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the command of the last sweep in a folder, and the label of each of its runs by folder name.

    Both are empty if no sweep was started there.
    """
    file = folder / SWEEP_FILE
    if not file.exists():
        return "", {}
    content = orjson.loads(file.read_bytes())
    return content["command"], content["runs"]


def difference_in_setting(first: Run, second: Run) -> str:
    """Return the reason why two finished runs cannot be compared; empty if they can."""
    ours, theirs = first.result, second.result
    if ours["data"]["tokens"] != theirs["data"]["tokens"]:
        return _first_difference("data", ours, theirs)
    if ours["steps"] != theirs["steps"]:
        return f"the first was trained for {ours['steps']:,} steps and the second for {theirs['steps']:,}"
    both = ours["definitions"].keys() & theirs["definitions"]  # a dense model has no definition of load
    if any(ours["definitions"][key] != theirs["definitions"][key] for key in both):
        return _first_difference("definitions", ours, theirs)
    return ""


def _definition(metric: str, definitions: dict[str, str]) -> str | None:
    """Return the most specific definition of a metric: `ppl_drop_1` matches `ppl_drop_<number>`."""
    names = [name for name in definitions if re.fullmatch(re.sub("<.*?>", ".+", re.escape(name)), metric)]
    best = max(names, key=lambda name: (name == metric, len(name)), default=None)
    return KNOWN.get(metric) if best is None else definitions[best]


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")


def _first_difference(part: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Describe one difference between two records in a part; prefer a version or source to a hash."""
    ours, theirs = (flatten({part: record[part]}) for record in (first, second))
    differing = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    key = min(differing, key=lambda key: (key in ("data.text", "data.tokens"), key not in ours or key not in theirs))
    return f"{key} is {ours.get(key)!r} in the first and {theirs.get(key)!r} in the second"

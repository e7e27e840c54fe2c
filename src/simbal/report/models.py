"""Models of Hugging Face that evaluate.py has measured into a folder: rows of its table beside the arms of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simbal.analysis.result import is_measured_model, read_model
from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.collect import definitions_of_analyses, numbers_of_analyses, read_analyses
from simbal.report.columns import ABSENT, Cell, number_cell, of_analysis
from simbal.runs.folder import is_run

USUAL = (  # columns where none are chosen
    "quality.bpb", "quality.ppl", "redundancy.min_pes", "routing.seu", "routing.max_vio", "routing.unique_experts",
    "routing.entropy", "orthogonality.gram_deviation",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredModel:
    """A model, and what the analyses have found of it."""

    path: Path  # the folder of its results
    facts: dict[str, Any]  # the content of its model.json
    analyses: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        """The name of its row."""
        return self.path.name

    @property
    def circumstances(self) -> str:
        """A sentence on the text, the tokenizer and the precision."""
        data = self.facts["data"]
        return (
            f"{self.name}: {self.facts['source']}, data {data['source']}, tokens {data['tokens'][:12]} of its own "
            f"tokenizer, {self.facts['context']:,} in a window, {self.facts['dtype']}"
        )

    @cached_property
    def analysed(self) -> dict[str, float | None]:
        """Its numbers, as `redundancy.min_pes`."""
        return numbers_of_analyses(self.analyses)

    @property
    def definitions(self) -> dict[str, str]:
        """The definitions of its numbers."""
        return definitions_of_analyses(self.analyses)

    def value(self, metric: str) -> float | None:
        """Return a number; None if it was not measured."""
        return self.analysed.get(metric)

    def cells(self, columns: Sequence[str], metrics: Sequence[Metric]) -> list[Cell]:
        """Return its row: its name under the first of the label columns, no seeds, and its numbers."""
        labels = [Cell(self.name), *(Cell(ABSENT) for _ in columns[1:])]
        numbers = [number_cell(metric.number, self.value(metric.key)) for metric in metrics]
        return [*labels, number_cell("{}", 1), Cell(ABSENT), *numbers]


def measured_models(folder: Path) -> list[MeasuredModel]:
    """Return the models that were measured into a folder, by name; `UserError` if a file of one is broken."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and is_measured_model(path)]
    return [MeasuredModel(path, read_model(path), read_analyses(path / "analysis")) for path in found]


def has_runs(folder: Path) -> bool:
    """Whether a folder holds runs."""
    return any(is_run(path) for path in folder.iterdir())


def usual_of_models(models: Sequence[MeasuredModel]) -> list[Metric]:
    """Return the metrics that a table has of models where none are chosen."""
    return [of_analysis(key) for key in USUAL if any(model.value(key) is not None for model in models)]


def notes_on_models(models: Sequence[MeasuredModel]) -> list[str]:
    """Return what a reader must know before models are compared."""
    if not models:
        return []
    return [
        *(f"{model.circumstances}." for model in models),
        "Models have tokenizers of their own: their losses and perplexities, of a token each, cannot be compared; bits "
        "per byte can, on the same text.",
    ]

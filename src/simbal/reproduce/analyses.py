"""What the analyses of a study's runs have found, over seeds: analyses.md for people, analyses.csv for programs."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simbal.run_folder import write_text
from simbal.table.arms import ABSENT, Arm
from simbal.table.export import escape, markdown_table
from simbal.table.metric import Metric, refuse_unlike
from simbal.table.statistics import Summary, summarize

HEADINGS = ["analysis", "number", "layer", "arm", "mean", "sd", "n"]


@dataclass(frozen=True)
class Found:
    """One number of one arm, of the whole model or of a layer."""

    analysis: str
    number: str
    layer: int | None
    arm: str
    summary: Summary

    @property
    def text(self) -> str:
        """`mean ± sd` to four digits."""
        return Metric(self.number, self.number, "{:.4g}").write(self.summary)


def write_analyses(arms: Sequence[Arm], folder: Path) -> None:
    """Write both files; nothing if no run was analysed.

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
    write_text(folder / "analyses.md", _markdown(found, analyses))


def _found(arms: Sequence[Arm], name: str) -> Iterator[Found]:
    """By number, the whole model before the layers, then by layer, then by arm."""
    values: dict[tuple[str, int | None], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for arm in arms:
        for analysis in (run.analyses[name] for run in arm.runs if name in run.analyses):
            for number, layer, value in _numbers(analysis):
                values[number, layer][arm.name].append(value)
    for (number, layer), by_arm in values.items():
        for arm_name, of_seeds in by_arm.items():
            if summary := summarize(of_seeds):
                yield Found(name, number, layer, arm_name, summary)


def _numbers(analysis: Mapping[str, Any]) -> Iterator[tuple[str, int | None, float]]:
    """Of the model, then of each layer; lists of lists, as the tokens of every expert, are for programs."""
    for number, value in analysis["metrics"].items():
        if value is not None:
            yield number, None, value
    for number, of_layers in analysis.get("layers", {}).items():
        for layer, value in enumerate(of_layers):
            if isinstance(value, int | float):
                yield number, layer, value


def _markdown(found: Sequence[Found], analyses: Mapping[str, Mapping[str, Any]]) -> str:
    parts = ["# Analyses: mean ± standard deviation over seeds"]
    for name in sorted(analyses):
        here = [each for each in found if each.analysis == name]
        arms = [*dict.fromkeys(each.arm for each in here)]
        model, layers = [each for each in here if each.layer is None], [each for each in here if each.layer is not None]
        parts += [f"## {escape(name)}", markdown_table(["", *arms], _by(model, arms))]
        if layers:
            depth = 1 + max(each.layer or 0 for each in layers)
            parts.append(markdown_table(["", "arm", *(f"layer {i}" for i in range(depth))], _by_layer(layers, depth)))
        texts = analyses[name]["definition"].items()
        parts.append("\n".join(f"- {escape(number)}: {escape(text)}" for number, text in texts))
    return "\n\n".join(parts) + "\n"


def _by(model: Sequence[Found], arms: Sequence[str]) -> Iterator[list[str]]:
    """One row for each number, one column for each arm."""
    cells = {(each.number, each.arm): each.text for each in model}
    for number in dict.fromkeys(each.number for each in model):
        yield [number, *(cells.get((number, arm), ABSENT) for arm in arms)]


def _by_layer(layers: Sequence[Found], depth: int) -> Iterator[list[str]]:
    """One row for each number and arm, one column for each layer."""
    cells = {(each.number, each.arm, each.layer): each.text for each in layers}
    for number, arm in dict.fromkeys((each.number, each.arm) for each in layers):
        yield [number, arm, *(cells.get((number, arm, layer), ABSENT) for layer in range(depth))]

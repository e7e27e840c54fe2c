"""What faults have done to a sweep: its folder beside that of a sweep that was left alone."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sweep.small_sweep import curve, results

KEPT_DOTS = (".lock", ".lock.held")  # the marker of a process that was killed
RECORDED = (
    "metrics",
    "layers",
    "steps",
    "tokens",
    "threads",
    "data",
    "definitions",
)  # of record.json, what must be the same


@dataclass
class Verdict:
    """Runs without their result, results that are others, and whatever else must not be."""

    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """All of it, a line each."""
        named = {"lost": self.lost, "changed": self.changed, "wrong": self.other}
        return [f"{name}: {what}" for name, found in named.items() for what in found]


def compare(reference: Path, outputs: Path) -> Verdict:
    """Judge the sweep in `outputs` by the one in `reference`, both complete, bit for bit."""
    verdict = Verdict()
    ours, theirs = _runs(reference), _runs(outputs)
    arms, listed = _table(outputs, verdict)
    verdict.lost = [run for run in ours if run not in theirs or ours[run] not in listed]
    verdict.other += [f"{run} is one run too many" for run in theirs if run not in ours]
    verdict.other += [f"{name} stands {n} times in the table" for name, n in listed.items() if n > 1]
    for run in sorted({*ours} - {*verdict.lost}):
        if difference := _difference(reference / "default" / run, outputs / "default" / run):
            verdict.changed.append(f"{run}: {difference}")
    if not verdict.lost and not verdict.changed and arms != results(reference)[0]:
        verdict.changed.append("the table, of runs that are the same")
    verdict.other += [f"{file} was left behind" for file in leftovers(reference, outputs)]
    verdict.other += [said for file in sorted(outputs.glob("default/*/console.log")) if (said := traceback(file))]
    return verdict


def leftovers(reference: Path, outputs: Path) -> list[Path]:
    """Temporary files, and checkpoints that finished runs need no more."""
    hidden = [file for file in outputs.glob("default/**/.*") if file.name not in KEPT_DOTS]
    wanted = {file.name for file in reference.glob("default/*/checkpoints/*")}
    return sorted(hidden + [file for file in outputs.glob("default/*/checkpoints/[!.]*") if file.name not in wanted])


def traceback(file: Path) -> str | None:
    """How the first traceback ends in what a program has printed; None if there is none."""
    lines = iter(file.read_text(errors="replace").splitlines())
    if not any(line.startswith("Traceback (most recent call last)") for line in lines):
        return None
    return f"{file}: {next((line for line in lines if line and line[0] != ' '), 'a traceback without an end')}"


def _runs(outputs: Path) -> dict[str, str]:
    """The beginning of the config's hash, by run folder."""
    folders = sorted(file.parent.name for file in outputs.glob("default/*/config.yaml"))
    return {name: name.rpartition("-")[2] for name in folders}


def _table(outputs: Path, verdict: Verdict) -> tuple[Any, Counter[str]]:
    """The arms of table.json, and how often each run stands in it, by the beginning of its hash."""
    try:
        table = json.loads((outputs / "default" / "table.json").read_text())
        arms, _ = results(outputs)
    except (OSError, ValueError, KeyError) as error:
        verdict.other.append(f"no table: {type(error).__name__}: {error}")
        return None, Counter()
    absent = [*table["without_result"], *table["missing"]]
    verdict.other += [f"the table has no result of {entry['run']}" for entry in absent]
    return arms, Counter(run["config_hash"][:8] for arm in table["arms"] for run in arm["runs"])


def _difference(reference: Path, run: Path) -> str | None:
    """Where the curves or the record of a run first differ from those of the reference."""
    try:
        ours, theirs = curve(reference / "metrics.jsonl"), curve(run / "metrics.jsonl")
        records = [json.loads((folder / "record.json").read_text()) for folder in (reference, run)]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if a != b:
            keys = [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
            return f"metrics.jsonl, row {place}, {keys[0]}: {a.get(keys[0])!r} became {b.get(keys[0])!r}"
    if len(ours) != len(theirs):
        return f"metrics.jsonl has {len(theirs)} rows instead of {len(ours)}"
    if gone := [
        file.name for file in (reference / "checkpoints").iterdir() if not (run / "checkpoints" / file.name).exists()
    ]:
        return f"checkpoints/{gone[0]} is not there"
    differing = [key for key in RECORDED if records[0].get(key) != records[1].get(key)]
    return f"record.json, {differing[0]}" if differing else None

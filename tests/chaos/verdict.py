"""Compare a sweep with faults to the same sweep without faults, bit for bit."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sweep.small_sweep import curve, results

LOCK_FILES = (".lock", ".lock.held")  # a killed process leaves them
COMPARED = ("metrics", "layers", "steps", "tokens", "threads", "data", "definitions")  # entries of record.json


@dataclass
class Verdict:
    """Runs without a result, changed results, and other problems."""

    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """All problems, a line each."""
        problems = {"lost": self.lost, "changed": self.changed, "wrong": self.other}
        return [f"{name}: {problem}" for name, found in problems.items() for problem in found]


def compare(reference: Path, outputs: Path) -> Verdict:
    """Compare the complete sweep in `outputs` with the sweep in `reference`."""
    verdict = Verdict()
    ours, theirs = (
        sorted(file.parent.name for file in sweep.glob("default/*/config.yaml")) for sweep in (reference, outputs)
    )
    arms, listed = read_table(outputs, verdict)
    verdict.lost = [run for run in ours if run not in theirs or run.rpartition("-")[2] not in listed]
    verdict.other += [f"{run} is one run too many" for run in theirs if run not in ours]
    verdict.other += [f"{name} is {count} times in the table" for name, count in listed.items() if count > 1]
    for run in sorted({*ours} - {*verdict.lost}):
        if difference := find_difference(reference / "default" / run, outputs / "default" / run):
            verdict.changed.append(f"{run}: {difference}")
    if not verdict.lost and not verdict.changed and arms != results(reference)[0]:
        verdict.changed.append("the table of unchanged runs")
    wanted = {file.name for file in reference.glob("default/*/checkpoints/*")} | {*LOCK_FILES}
    # not in default/ itself: several sweeps may write pages there, so no sweep removes what a killed one left
    files = [*outputs.glob("default/*/**/.*"), *outputs.glob("default/*/checkpoints/[!.]*")]
    verdict.other += [f"{file} was left behind" for file in sorted(files) if file.name not in wanted]
    consoles = map(find_traceback, sorted(outputs.glob("default/*/console.log")))
    verdict.other += [line for line in consoles if line]
    return verdict


def find_traceback(file: Path) -> str | None:
    """Return the last line of the first traceback in a program's output."""
    lines = iter(file.read_text(errors="replace").splitlines())
    if not any(line.startswith("Traceback (most recent call last)") for line in lines):
        return None
    return f"{file}: {next((line for line in lines if line and line[0] != ' '), 'a traceback without an end')}"


def read_table(outputs: Path, verdict: Verdict) -> tuple[Any, Counter[str]]:
    """Return the arms of table.json, and how often it has each run, by the start of its hash."""
    try:
        table = json.loads((outputs / "default" / "table.json").read_text())
        arms, _ = results(outputs)
    except (OSError, ValueError, KeyError) as error:
        verdict.other.append(f"no table: {type(error).__name__}: {error}")
        return None, Counter()
    absent = [*table["without_result"], *table["missing"]]
    verdict.other += [f"the table has no result of {entry['run']}" for entry in absent]
    return arms, Counter(run["config_hash"][:8] for arm in table["arms"] for run in arm["runs"])


def find_difference(reference: Path, run: Path) -> str | None:
    """Return where a run's curves, checkpoints or record differ from the reference."""
    try:
        ours, theirs = curve(reference / "metrics.jsonl"), curve(run / "metrics.jsonl")
        records = [json.loads((folder / "record.json").read_text()) for folder in (reference, run)]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return f"metrics.jsonl, row {place}, {key}: {a.get(key)!r} became {b.get(key)!r}"
    if len(ours) != len(theirs):
        return f"metrics.jsonl has {len(theirs)} rows instead of {len(ours)}"
    for file in (reference / "checkpoints").iterdir():
        if not (run / "checkpoints" / file.name).exists():
            return f"checkpoints/{file.name} is missing"
    differing = [key for key in COMPARED if records[0].get(key) != records[1].get(key)]
    return f"record.json, {differing[0]}" if differing else None

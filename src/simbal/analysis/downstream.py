"""Accuracy of a trained run on benchmarks, without examples in the prompt, by lm-evaluation-harness.

Reference: arXiv 2506.14038, table 5; the benchmarks' prompts and metrics are those of lm-eval 0.4.13.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from simbal.analysis import benchmark_items, harness
from simbal.analysis.benchmark_items import Benchmark, Item
from simbal.analysis.finding import Finding
from simbal.analysis.run_tokenizer import run_tokenizer
from simbal.analysis.trained import TrainedRun
from simbal.checks import whole_number
from simbal.console import new_grid
from simbal.errors import UserError

DEFINITION = {
    "<task>": "share of the items whose right continuation has the largest log-likelihood of all; no examples before",
    "<task>_se": "sqrt(p (1 - p) / (n - 1)), of this set of items; seeds of the training are another source of spread",
    "<task>_norm": "the same with log-likelihoods divided by the continuations' lengths in characters",
    "chance": "mean over the items of 1 / (number of choices)",
    "commonest": "accuracy of always giving the commonest answer",
    "average": "mean of the tasks named in average_of; its standard error takes them as independent",
    "items": "n of them, evenly spaced over the benchmark",
}
Row = dict[str, Any]


def downstream(trained: TrainedRun, tasks: list[str], limit: int | None, batch_size: int) -> Finding:
    """Accuracy on each benchmark, with its standard error and what chance would give.

    Args:
        trained: the run; one on symbols (data=synthetic) has no text.
        tasks: of `BENCHMARKS`.
        limit: items of each task, evenly spaced over all of them, at least 2; None: all.
        batch_size: requests at once; it changes nothing but the speed.

    Raises:
        UserError: a key is out of its range, or lm-eval or the benchmarks' items are not installed.
    """
    benchmarks = _checked(tasks, limit, batch_size)
    harness.require_harness()
    source, tokenizer = benchmark_items.package_folder(), run_tokenizer(trained)
    items = {name: benchmark_items.read_items(benchmark, source) for name, benchmark in benchmarks.items()}
    places = {name: evenly_spaced(len(found), limit) for name, found in items.items()}
    folder = Path(trained.spec.config["data"]["cache_dir"], "benchmarks")
    harness.write_tasks(folder, benchmarks, items)
    results = harness.scores(trained, tokenizer, batch_size, folder, places)
    rows = {
        name: _row(benchmark, [items[name][place] for place in places[name]], results[name])
        for name, benchmark in benchmarks.items()
    }
    return Finding([_table(benchmarks, rows)], _notes(benchmarks, rows, limit), _record(rows))


def _checked(tasks: Any, limit: Any, batch_size: Any) -> dict[str, Benchmark]:
    known = benchmark_items.BENCHMARKS
    if not isinstance(tasks, list) or not tasks or len(set(map(str, tasks))) < len(tasks):
        raise UserError(f"analysis.downstream.tasks={tasks} must be a list of different tasks: {', '.join(known)}")
    for name in tasks:
        if name not in known:
            raise UserError(f"analysis.downstream.tasks: there is no task {name}; there are {', '.join(known)}")
    if limit is not None:
        whole_number("analysis.downstream.limit", limit, 2)
    whole_number("analysis.downstream.batch_size", batch_size, 1)
    return {name: known[name] for name in tasks}


def evenly_spaced(count: int, limit: int | None) -> list[int]:
    """At most `limit` places in 0 to count - 1: the first items of a benchmark can be of one kind."""
    kept = count if limit is None else min(limit, count)
    return [place * count // kept for place in range(kept)]


def _row(benchmark: Benchmark, items: list[Item], result: dict[str, Any]) -> Row:
    answers = Counter(str(benchmark.answer(item)) for item in items)
    return {
        "n": len(items),
        "accuracy": result["acc,none"],
        "standard_error": result["acc_stderr,none"],
        "normalised": result.get("acc_norm,none"),
        "chance": math.fsum(1 / benchmark.choices(item) for item in items) / len(items),
        "commonest": answers.most_common(1)[0][1] / len(items),
    }


def _average(rows: dict[str, Row]) -> tuple[float, float]:
    """Mean accuracy and its standard error."""
    mean = math.fsum(row["accuracy"] for row in rows.values()) / len(rows)
    return mean, math.sqrt(math.fsum(row["standard_error"] ** 2 for row in rows.values())) / len(rows)


def _table(benchmarks: dict[str, Benchmark], rows: dict[str, Row]) -> Table:
    grid = new_grid("accuracy on benchmarks, no examples in the prompt")
    grid.add_column("task")
    for title in ("n", "accuracy", "standard error", "by length", "chance", "commonest answer"):
        grid.add_column(title, justify="right")
    for name, row in rows.items():
        keys = ("accuracy", "standard_error", "normalised", "chance", "commonest")
        cells = ["" if row[key] is None else f"{row[key]:.4f}" for key in keys]
        grid.add_row(benchmarks[name].title, f"{row['n']:,}", *cells)
    return grid


def _notes(benchmarks: dict[str, Benchmark], rows: dict[str, Row], limit: int | None) -> list[str]:
    notes = []
    if len(rows) > 1:
        mean, spread = _average(rows)
        titles = ", ".join(benchmark.title for benchmark in benchmarks.values())
        notes.append(f"Average of {titles}: {mean:.4f}, standard error {spread:.4f}.")
    if limit is not None:
        notes.append(f"At most {limit} items of each task, evenly spaced; analysis.downstream.limit=null takes all.")
    notes.append(
        "A model of toy size is expected at chance: a difference within two standard errors of it says nothing. "
        '"by length": log-likelihoods divided by the length of the answers.'
    )
    return notes


def _record(rows: dict[str, Row]) -> dict[str, Any]:
    metrics: dict[str, float] = {}
    for name, row in rows.items():
        metrics |= {name: row["accuracy"], f"{name}_se": row["standard_error"]}
        if row["normalised"] is not None:
            metrics[f"{name}_norm"] = row["normalised"]
    if len(rows) > 1:
        metrics["average"], metrics["average_se"] = _average(rows)
    return {
        "definition": DEFINITION,
        "items": benchmark_items.PACKAGE,
        "seed": None,  # nothing is drawn
        "tasks": rows,
        "average_of": list(rows),
        "metrics": metrics,
    }

"""Generate the page that defines every number of a record, a table or an analysis."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from generators import source
from generators.markup import prose, table
from simbal.metrics.definitions import NUMBERS, SIMILARITY, TRAINING, VALIDATION, Metric

NAME = {"DEFINITION"}
HEADINGS = ("key", "column", "unit", "better", "definition")


def definitions(root: Path) -> dict[str, Mapping[str, str]]:
    """Return the definitions of each analysis by the path of its module in src/simbal, such as `analysis/routing`."""
    package = root / "src/simbal"
    by_file = source.dictionaries(package, NAME)
    return {file.relative_to(package).with_suffix("").as_posix(): texts for file, texts in by_file}


def definitions_page(root: Path) -> str:
    """Return the page: numbers of a run, per layer, per training step, and of each analysis."""
    parts = [
        "# Definitions\n",
        "Definitions of all numbers in records and tables.\n",
        "## Numbers of a run\n",
        "`columns=[...]` accepts the key or its last part.\n",
        _metrics(NUMBERS),
        "## Numbers per layer\n",
        "A record has these in `layers`, together with the per-layer values of all sums and means over layers.\n",
        _metrics(metric for metric in (*VALIDATION, *SIMILARITY) if metric not in NUMBERS),
        "## Numbers of a training step\n",
        "The rows of metrics.jsonl.\n",
        _metrics(TRAINING),
        *(_analysis(module, texts) for module, texts in definitions(root).items()),
    ]
    return "\n".join(parts)


def _metrics(metrics: Iterable[Metric]) -> str:
    rows = [
        (f"`{m.key}`", m.title, m.unit, "" if m.better == "neither" else m.better, prose(m.definition)) for m in metrics
    ]
    return table(HEADINGS, rows)


def rows(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the rows of a table of definitions."""
    return [(f"`{key}`", prose(text)) for key, text in texts.items()]


def _analysis(module: str, texts: Mapping[str, str]) -> str:
    name = module.rpartition("/")[2]
    return f"## analysis={name}\n\n{table(('name', 'definition'), rows(texts))}"

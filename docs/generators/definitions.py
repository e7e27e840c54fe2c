"""The page that defines every number of a record, a table or an analysis, in the code's own words."""

from collections.abc import Mapping
from pathlib import Path

from generators import source
from generators.markup import prose, table
from simbal.report.metric import METRICS

NAMES = {"DEFINITION", "DEFINITIONS"}
BETTER = {"↓": "lower", "↑": "higher"}


def definitions(root: Path) -> dict[str, Mapping[str, str]]:
    """Return every dictionary of definitions by its module's path below src/simbal, such as `analysis/routing`."""
    package = root / "src/simbal"
    found = source.dictionaries(package, NAMES)
    return {file.relative_to(package).with_suffix("").as_posix(): texts for file, texts in found}


def definitions_page(root: Path) -> str:
    """Return the page: the table's columns, then everything else that is measured."""
    found = definitions(root)
    of_runs = {module: texts for module, texts in found.items() if not module.startswith("analysis/")}
    known = {key: text for texts in of_runs.values() for key, text in texts.items()}
    columns = [(m.title, f"`{m.key}`", BETTER.get(m.arrow, ""), prose(known[m.key])) for m in METRICS]
    shown = {metric.key for metric in METRICS}
    others = [(f"`{key}`", prose(text)) for key, text in known.items() if key not in shown]
    parts = [
        "# Definitions\n",
        "Every record and every table carries the definitions of its numbers. These are all of them.\n",
        "## Columns of the table\n",
        "`columns=[...]` takes the key, or its last part alone.\n",
        table(("column", "key", "better", "definition"), columns),
        "## Other numbers of a run\n",
        table(("key", "definition"), others),
        *(_analysis(module, texts) for module, texts in found.items() if module not in of_runs),
    ]
    return "\n".join(parts)


def rows(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the rows of a table of definitions."""
    return [(f"`{key}`", prose(text)) for key, text in texts.items()]


def _analysis(module: str, texts: Mapping[str, str]) -> str:
    name = module.removeprefix("analysis/")
    return f"## analysis={name}\n\n{table(('name', 'definition'), rows(texts))}"

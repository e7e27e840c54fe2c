"""Generate the reference page of analyses: description, keys and numbers."""

from pathlib import Path

import yaml

from generators import source
from generators.configuration import about, body
from generators.definitions import definitions, rows
from generators.markup import prose, table
from simbal.config.options import options

SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:")
LEGENDS = ("Reference: ", "Shapes: ")


def analyses_page(root: Path) -> str:
    """Return the page, with one section per file of conf/analysis."""
    known = definitions(root)
    parts = [
        "# Analyses\n",
        "`python evaluate.py run=outputs/<name> analysis=` one of these, or several as `[a,b]`.\n",
    ]
    for name, file in options("analysis").items():
        target = yaml.safe_load(file.read_text())[name]["_target_"]
        path = target.removeprefix("simbal.").rpartition(".")[0].replace(".", "/")
        module, texts = root / "src/simbal" / f"{path}.py", known.get(path)
        defined = table(("name", "definition"), rows(texts)) if texts else ""
        parts.append(f"## {name}\n\n{about(file)}\n{paragraphs(source.docstring(module))}\n{body(file)}\n{defined}")
    return "\n".join(parts)


def paragraphs(docstring: str) -> str:
    """Return a docstring as Markdown, with references and shape legends as separate paragraphs.

    Indented lines are code, except in sections such as `Args:`.
    """
    converted, in_section = [], False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            in_section = line in SECTIONS
        if line.startswith(LEGENDS):
            converted.append("")
        converted.append(line if line.startswith("    ") and not in_section else prose(line))
    return "\n".join(converted) + "\n"

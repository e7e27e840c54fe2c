"""All pages that are no file of docs/, and the order of all pages."""

from pathlib import Path
from typing import Any

from generators import source
from generators.analyses import analyses_page
from generators.api import api_pages
from generators.commands import commands_page
from generators.configuration import configuration_pages
from generators.definitions import definitions_page
from generators.markup import WIDE, code, prose
from generators.strategies import strategies_page

DOORS = " ".join(
    f"[{title}]({page}){{ .md-button }}"
    for title, page in (
        ("Start", "tutorial.md"), ("How to", "guide/how_to.md"), ("Reference", "reference/commands.md"),
        ("Results", "results/README.md"),
    )
)  # fmt: skip
FILES = {"index.md": "README.md", "measured.md": "benchmarks/RESULTS.md", "changes.md": "CHANGELOG.md"}
GUIDES = (  # in the order in which a user meets them
    "how_to", "installing", "running", "sweeps", "paper", "outputs", "runs", "statistics", "resuming", "strategies",
    "own_strategy", "own_threshold", "own_model", "architectures", "python", "analyses", "measuring", "search",
    "models", "experts", "text", "scaling", "export", "developing",
)  # fmt: skip


def generated_pages(root: Path) -> dict[str, str]:
    """Return text by its path in the site: pages, and what those of results/ show."""
    return {
        **{page: _as_page(root / file) for page, file in FILES.items()},
        **_results(root),
        "reference/commands.md": commands_page(root),
        "reference/strategies.md": strategies_page(root),
        "reference/analyses.md": analyses_page(root),
        "reference/definitions.md": definitions_page(root),
        **configuration_pages(root),
        **api_pages(root),
        **{f"examples/{file.stem}.md": _example(file) for file in sorted((root / "docs/examples").glob("*.py"))},
    }


def navigation(pages: dict[str, str]) -> list[dict[str, Any]]:
    """Return the tree of pages; a title is the page's own heading but where one is given."""

    def below(folder: str, ending: str = ".md") -> list[str]:
        return [page for page in pages if page.startswith(f"{folder}/") and page.endswith(ending)]

    studies = sorted(below("results", "/README.md"), key=lambda path: (path.count("/"), path))  # all of them first
    return [
        {"Home": "index.md"},
        {"Tutorial": "tutorial.md"},
        {"Guide": [f"guide/{name}.md" for name in GUIDES]},
        {"Results": studies},
        {"Examples": below("examples")},
        {
            "Reference": [
                *(f"reference/{name}.md" for name in ("commands", "strategies", "analyses", "definitions")),
                {"Configuration": below("reference/conf")},
            ]
        },
        {"Code": below("api")},
        {"More": ["measured.md", "changes.md"]},
    ]


def _as_page(file: Path) -> str:
    """Return a Markdown file from beside docs/ as a page in it, with its links to docs/ leading to the same files."""
    text = file.read_text(encoding="utf-8").replace("](docs/", "](")
    return WIDE + text.replace("## Start", f"{DOORS}\n\n## Start", 1) if file.name == "README.md" else text


def _results(root: Path) -> dict[str, str]:
    """Return every file of results/ by its path in the repository, so that links between them hold."""
    files = {
        file.relative_to(root).as_posix(): file
        for file in sorted((root / "results").rglob("*"))
        if file.is_file() and file.suffix in (".md", ".csv", ".json", ".svg", ".yaml", ".txt")
    }
    return {path: WIDE * path.endswith(".md") + file.read_text(encoding="utf-8") for path, file in files.items()}


def _example(file: Path) -> str:
    """Return a page that shows a program of docs/examples/ whole."""
    title, program = file.stem.replace("_", " ").capitalize(), code(file.read_text(encoding="utf-8"), "python")
    return f"{WIDE}# {title}\n\n{prose(source.docstring(file))}\n\n`docs/examples/{file.name}`:\n\n{program}"

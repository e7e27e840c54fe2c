"""Generate the pages that are not files of docs/, and the sidebar."""

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
FILES = {
    "index.md": "README.md",
    "measured.md": "benchmarks/RESULTS.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
GUIDES = {  # sidebar titles by page, in reading order
    "installing": "Installing",
    "running": "Runs and sweeps",
    "outputs": "Outputs",
    "statistics": "Statistics",
    "resuming": "Resuming",
    "strategies": "Strategies",
    "own_strategy": "Your own strategy",
    "models": "Models and experts",
    "text": "Text",
    "analyses": "Analyses",
    "huggingface": "Hugging Face models",
    "scaling": "Scaling",
    "paper": "The paper's tables",
    "developing": "Developing",
}


def generated_pages(root: Path) -> dict[str, str]:
    """Return the text of each generated page by its path in the site."""
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
    """Return the sidebar: titles and pages."""

    def below(folder: str, ending: str = ".md") -> list[str]:
        return [page for page in pages if page.startswith(f"{folder}/") and page.endswith(ending)]

    studies = sorted(page for page in below("results", "/README.md") if page.count("/") > 1)
    return [
        {"Home": "index.md"},
        {"Tutorial": "tutorial.md"},
        {"How to": "guide/how_to.md"},
        {"Guide": [{title: f"guide/{name}.md"} for name, title in GUIDES.items()]},
        {"Results": [{"All claims": "results/README.md"}, *({_study_title(page): page} for page in studies)]},
        {
            "Reference": [
                {"Commands": "reference/commands.md"},
                {"Strategies": "reference/strategies.md"},
                {"Analyses": "reference/analyses.md"},
                {"Metrics": "reference/definitions.md"},
                {"Configuration": below("reference/conf")},
                {"Examples": below("examples")},
                {"Python API": below("api")},
            ]
        },
        {"More": [{"Benchmarks": "measured.md"}, {"Contributing": "contributing.md"}, {"Changes": "changes.md"}]},
    ]


def _study_title(page: str) -> str:
    """Return `results/why_hash/README.md` as "Why hash"."""
    return page.split("/")[1].replace("_", " ").capitalize()


def _as_page(file: Path) -> str:
    """Return a Markdown file of the repository's root as a page of docs/, with its links adapted."""
    text = file.read_text(encoding="utf-8").replace("](docs/", "](")
    return WIDE + text.replace("## Start", f"{DOORS}\n\n## Start", 1) if file.name == "README.md" else text


def _results(root: Path) -> dict[str, str]:
    """Return every file of results/ by its path, so that links between the pages work."""
    files = {
        file.relative_to(root).as_posix(): file
        for file in sorted((root / "results").rglob("*"))
        if file.is_file() and file.suffix in (".md", ".csv", ".json", ".svg", ".yaml", ".txt")
    }
    texts = {path: file.read_text(encoding="utf-8") for path, file in files.items()}
    return {
        path: WIDE + text.replace("../docs/", "../") if path.endswith(".md") else text for path, text in texts.items()
    }


def _example(file: Path) -> str:
    """Return a page with the source of a program of docs/examples/."""
    title, program = file.stem.replace("_", " ").capitalize(), code(file.read_text(encoding="utf-8"), "python")
    return f"{WIDE}# {title}\n\n{prose(source.docstring(file))}\n\n`docs/examples/{file.name}`:\n\n{program}"

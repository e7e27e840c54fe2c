"""All generated pages, and the order of all pages."""

from pathlib import Path
from typing import Any

from generators.analyses import analyses_page
from generators.api import api_pages
from generators.commands import commands_page
from generators.configuration import configuration_pages
from generators.definitions import definitions_page
from generators.examples import FOLDER, example_pages
from generators.readme import OWN_STRATEGY_PAGE, readme_pages, whole_files
from generators.results import result_files, result_pages
from generators.strategies import strategies_page


def generated_pages(root: Path) -> dict[str, str]:
    """Text by its path in the site: pages, and what those of results/ show."""
    return {
        **readme_pages(root),
        **result_files(root),
        "reference/commands.md": commands_page(root),
        "reference/strategies.md": strategies_page(root),
        "reference/analyses.md": analyses_page(root),
        "reference/definitions.md": definitions_page(root),
        **configuration_pages(root),
        **api_pages(root),
        **example_pages(root / "docs"),
        **whole_files(root),
    }


def navigation(pages: dict[str, str], docs: Path) -> list[dict[str, Any]]:
    """The tree of pages; a title is the page's own heading but where one is given."""
    written = {path.relative_to(docs).as_posix() for path in (docs / FOLDER).rglob("*.md")}
    examples = sorted(written | {page for page in pages if page.startswith(f"{FOLDER}/")})
    groups = [page for page in pages if page.startswith("reference/conf/")]
    return [
        {"Home": "index.md"},
        {"Tutorial": "tutorial.md"},
        {"Guide": [page for page in pages if page.startswith("guide/") or page == OWN_STRATEGY_PAGE]},
        {"What is trusted": "trust.md"},
        *([{"Results": results}] if (results := result_pages(pages)) else []),
        *([{"Examples": examples}] if examples else []),
        {
            "Reference": [
                *(f"reference/{name}.md" for name in ("commands", "strategies", "analyses", "definitions")),
                {"Configuration": groups},
            ]
        },
        {"Code": [page for page in pages if page.startswith("api/")]},
        {"More": [page for page in ("measured.md", "changes.md") if page in pages]},
    ]

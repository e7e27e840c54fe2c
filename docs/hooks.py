"""Add the generated pages, which exist only in memory, and mark commands as shell code."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

from generators.site import generated_pages, navigation
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = re.compile(r"^ {4}(?:python|simbal|make|pip|source|docker|torchrun|jupyter) .*\n(?: {4}.*\n)*", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Generate the pages, and set the sidebar."""
    pages = generated_pages(ROOT)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav = navigation(pages)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put indented commands into shell code fences, for color and line wrapping; generated pages have fences."""
    if page.file.generated_by:
        return markdown
    return COMMANDS.sub(lambda found: f"```bash\n{dedent(found[0])}```\n", markdown)

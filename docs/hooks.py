"""Adds the generated pages to the site; they are made in memory and never written to docs/."""

from pathlib import Path

from generators.site import generated_pages, navigation
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages, and put all pages in their order."""
    pages = generated_pages(ROOT)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav = navigation(pages)
    return files

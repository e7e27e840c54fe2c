"""A built site as a test reads it: the text, anchors, links and resources of its pages."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}  # without a click
SILENT = {"script", "style"}


class Page(HTMLParser):
    """One HTML file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.rows: list[list[str]] = []  # of its tables
        self._words: list[str] = []
        self._silent = False
        self._cell: list[str] | None = None
        self.feed(file.read_text(encoding="utf-8"))
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given["id"]} if given.get("id") else set()
        self._silent = tag in SILENT
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link":
            self.resources.append(given["href"])
        if given.get(LOADED.get(tag)):
            self.resources.append(given[LOADED[tag]])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_endtag(self, tag):
        self._silent = False
        if tag in ("td", "th"):
            self.rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        if tag in ("p", "li", "td", "th", "h1", "h2", "h3", "h4", "div"):
            self._words.append(" ")

    def handle_data(self, data):
        if not self._silent:
            self._words.append(data)
        if self._cell is not None:
            self._cell.append(data)


class Site:
    """A folder of pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
        self.page = cache(lambda path: Page(folder / path))

"""The text, anchors, links and resources of the pages of a built site."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path

RESOURCES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """An HTML file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self._words: list[str] = []
        self._is_hidden = False
        self.feed(file.read_text(encoding="utf-8"))
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self._is_hidden = tag in ("script", "style")
        self.ids |= {given["id"]} if given.get("id") else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link":
            self.resources.append(given["href"])
        if given.get(RESOURCES.get(tag)):
            self.resources.append(given[RESOURCES[tag]])

    def handle_endtag(self, tag):
        self._is_hidden = False
        if tag in ("p", "li", "td", "th", "h1", "h2", "h3", "h4", "div"):
            self._words.append(" ")

    def handle_data(self, data):
        if not self._is_hidden:
            self._words.append(data)


class Site:
    """The folder of a built site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
        self.page = cache(lambda path: Page(folder / path))

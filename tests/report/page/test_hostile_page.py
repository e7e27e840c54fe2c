"""Whatever names, errors, values and warnings say, the page shows it as text."""

import json
import shutil
from html.parser import HTMLParser

import pytest

from simbal.report.report import report

HOSTILE = (
    "<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "</style><script>alert(1)</script>",
    "]]><svg onload=a>", "<!-- ", "--><b>", "&lt;script&gt;", "javascript:alert(1)", "{{ 7*7 }}",
    "{% raw %}", "'; alert(1); '", "</title><base href=//x>", "<a href='javascript:x'>",
    "</script><script>", "<svg/onload=x>", "$x^2$",
)  # fmt: skip
OURS = ("#", "./", "data:,", "data:image/png;base64,", "table.")  # beginnings of links


class Page(HTMLParser):
    """Its tags with their attributes, and all of its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.scripts: list[str] = []
        self.data: list[str] = []  # in script elements that no browser runs
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = "data" if dict(attrs).get("type") == "application/json" else tag

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        if self.inside == "data":
            self.data.append(data)
        self.text += data

    def handle_endtag(self, tag):
        self.inside = ""


@pytest.fixture
def plain(write_run, sweep) -> Page:
    """A page without hostile words, with everything that a page can have."""
    write_run("lbl", 8)
    write_run("simbal", 8)
    write_run("none", 9, status="failed", error="out of memory")
    (sweep / "sweep.json").write_text(json.dumps({"command": "train.py", "runs": {"never": "seed=9"}}))
    report(sweep)
    return Page((sweep / "index.html").read_text())


def require_plain(html: str, plain: Page) -> None:
    """The tags of a harmless page, but for how many; no handler; links that stay here; our scripts alone."""
    page = Page(html)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags}
    assert page.scripts == plain.scripts
    (curves,) = page.data
    assert isinstance(json.loads(curves), list)
    assert not set(curves) & {"<", ">", "&"}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("srcdoc", "formaction")], tag
        for name in ("href", "src", "action", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(OURS), (tag, attributes)


def write_hostile(write_run, sweep, error: str, value: str, definition: str, label: str) -> None:
    """Two arms, and a run each that has failed, diverged and was damaged."""
    said = {"definitions": {"val/ppl": definition}, "warnings": [error]}
    write_run("lbl", **said)
    write_run("simbal", **said, keys={"balancing.simbal.note": value, "data.cache_dir": value})
    write_run("none", 2, status="diverged", error=error, step=3, warnings=[error])
    write_run("none", 3, status="failed", error=error)
    damaged = write_run("none", 4)
    (damaged / "record.json").write_text(json.dumps({"status": error, "config_hash": "a"}))
    (sweep / "sweep.json").write_text(json.dumps({"command": label, "runs": {label: error}}))


def test_nothing_that_files_say_becomes_markup_also_in_figures_and_on_the_terminal(plain, write_run, sweep, capsys):
    shutil.rmtree(sweep)
    words = " ".join(HOSTILE)
    write_hostile(write_run, sweep, words, words, words, words)
    capsys.readouterr()
    report(sweep)
    require_plain((sweep / "index.html").read_text(), plain)

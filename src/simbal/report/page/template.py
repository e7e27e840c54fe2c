"""Fills in the template of the page: one file of HTML with its styles and scripts, which asks for nothing else.

Every text comes from files that anybody may have written, and the template escapes them all; a browser runs no script
but those whose digests the page's policy has.
"""

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

HERE = Path(__file__).parent


def render(scripts: Sequence[str], **values: Any) -> str:
    """Return the page with scripts of this package and values for the template's variables."""
    sources = [_source(name) for name in scripts]
    digests = [b64encode(sha256(source.encode()).digest()).decode() for source in sources]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return _template().render(
        css=_source("style.css") + _source("uplot/uPlot.min.css"),
        scripts=sources,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:",
        licence=_source("uplot/LICENSE"),
        **values,
    )


@cache
def _source(name: str) -> Markup:
    """Return a file of this package, to stand in the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html")

"""Turns a Figure into SVG: a file of its own, or a part of a page that follows the page's colours."""

import io
import re
import warnings
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from simbal.report.page.figures import INK, LINE, MUTED, RC
from simbal.report.page.styles import COLORS

CSS_COLORS = {INK: "--ink", MUTED: "--muted", LINE: "--line"} | {c: f"--arm{i}" for i, c in enumerate(COLORS)}
DECIMALS = re.compile(r"\d+\.\d+")
CURVED = re.compile("[A-KN-Yac-y]")
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def svg(figure: Figure, name: str, settings: dict[Any, Any] = RC) -> str:
    """Return the text of an SVG file, the same bytes for the same figure, name and settings of matplotlib."""
    with rc_context(settings | {"svg.hashsalt": f"simbal-{name}"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # only its width is guessed: text stays text
        for text in figure.findobj(match=lambda artist: hasattr(artist, "set_text")):
            text.set_text(NOT_XML.sub("�", text.get_text()))  # type: ignore[attr-defined]
        file = io.StringIO()
        figure.set_facecolor(settings["savefig.facecolor"])
        # in one pass; `savefig` draws everything twice
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(file, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def inline(text: str, name: str, title: str) -> Markup:
    """Return an `svg` element as wide as its container.

    Its ids begin with `name`, and its colours are the page's variables.
    """
    root = ElementTree.fromstring(text)
    for parent in [*root.iter()]:
        for child in [*parent]:
            if child.tag.endswith(("}style", "}metadata")):  # that style would hold for the whole page
                parent.remove(child)
    targets = [target for element in root.iter() for value in element.attrib.values() for target in _targets(value)]
    needed = {target: f"{name}-{number}" for number, target in enumerate(dict.fromkeys(targets))}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        plain = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib = {k: _value(k, v, needed) for k, v in plain.items() if k != "id" or v in needed}
        if element.tag != "text":  # indentation is a fifth of the file
            element.text = None
        element.tail = None
        if element.tag == "text" and element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
    for group in root.iter("g"):  # the marks of a line look alike
        looks = {mark.get("style") if mark.tag == "use" else None for mark in group}
        if len(group) > 1 and len(looks) == 1 and None not in looks:
            group.set("style", "; ".join(filter(None, (group.get("style"), *looks))))
            for mark in group:
                del mark.attrib["style"]
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": NOT_XML.sub("�", title)}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _targets(value: str) -> list[str]:
    """Return the ids that an attribute points to."""
    return re.findall(r"^(?:url\()?#([^)]+)\)?$", value)


def _value(key: str, value: str, ids: Mapping[str, str]) -> str:
    if key == "id":
        return ids[value]
    if key in ("href", "clip-path"):
        return re.sub(r"#([^)]+)", lambda found: f"#{ids[found[1]]}", value)
    if key in ("style", "fill", "stroke"):
        value = re.sub(r"font-family: [^;]*;? ?", "", value)  # the page's own
        return re.sub("#[0-9a-f]{6}", lambda found: _variable(found[0]), value)
    if key in ("d", "x", "y"):  # half of a file are digits that no screen shows
        short = " ".join(DECIMALS.sub(_shortened, value).split())
        return short if CURVED.search(short) else short.replace(" L ", " ")  # after a point, a bare one is a line
    return value


def _shortened(number: re.Match[str]) -> str:
    """Return a length in points with a hundredth of one, or with a tenth if it is no part of a small mark."""
    text = f"{float(number[0]):.{1 if float(number[0]) >= 10 else 2}f}"
    return text.rstrip("0").rstrip(".")


def _variable(color: str) -> str:
    return f"var({CSS_COLORS[color]})" if color in CSS_COLORS else color

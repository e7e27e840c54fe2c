"""Turns a Figure into SVG: a file of its own, or a part of a page that follows the page's colours."""

import io
import re
import warnings
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from simbal.report.page.figures import INK, LINE, MUTED, RC
from simbal.report.page.looks import COLORS

CSS_COLORS = {INK: "--ink", MUTED: "--muted", LINE: "--line"} | {c: f"--arm{i}" for i, c in enumerate(COLORS)}
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def svg(figure: Figure, name: str) -> str:
    """Return the text of an SVG file, the same bytes for the same figure and name."""
    with rc_context(RC | {"svg.hashsalt": f"simbal-{name}"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # only its width is guessed: text stays text
        for text in figure.findobj(match=lambda artist: hasattr(artist, "set_text")):
            text.set_text(NOT_XML.sub("�", text.get_text()))  # type: ignore[attr-defined]
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
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
    needed = {target for element in root.iter() for value in element.attrib.values() for target in _targets(value)}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        plain = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib = {k: _value(k, v, name) for k, v in plain.items() if k != "id" or v in needed}
        if element.tag != "text":  # indentation is a fifth of the file
            element.text = None
        element.tail = None
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": NOT_XML.sub("�", title)}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _targets(value: str) -> list[str]:
    """Return the ids that an attribute points to."""
    return re.findall(r"^(?:url\()?#([^)]+)\)?$", value)


def _value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", "clip-path"):
        return re.sub(r"^(url\()?#", rf"\1#{name}-", value)
    if key in ("style", "fill", "stroke"):
        value = re.sub(r"font-family: [^;]*;? ?", "", value)  # the page's own
        return re.sub("#[0-9a-f]{6}", lambda found: _variable(found[0]), value)
    return value.strip() if key == "d" else value


def _variable(color: str) -> str:
    return f"var({CSS_COLORS[color]})" if color in CSS_COLORS else color

"""The figures of a sweep as files for a paper: each as SVG and PDF that stand alone, and the numbers that they show."""

import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from simbal.files.disk import refusals_of_disk, replacing, write_text
from simbal.report.page.cards import Card
from simbal.report.page.figures import RC
from simbal.report.page.svg import svg

FOLDER, CURVES = "figures", "curves.csv"
HEADINGS = ("figure", "panel", "arm", "x", "mean", "low", "high", "band")
# of its own: the letters of a file that stands alone are paths in SVG and embedded fonts in PDF, on white
ALONE = RC | {"svg.fonttype": "path", "pdf.fonttype": 42, "savefig.facecolor": "white"}


def write_figures(shown: Sequence[Card], folder: Path) -> None:
    """Write figures/*.svg, figures/*.pdf and figures/curves.csv into `folder`, outputs/<name>.

    Args:
        shown: the cards that show something.
        folder: of a sweep.

    Raises:
        UserError: the disk refuses.
    """
    place = folder / FOLDER
    with refusals_of_disk(folder):
        place.mkdir(exist_ok=True)
    for card in shown:
        figure = card.figure()
        write_text(place / f"{card.name}.svg", svg(figure, card.name, ALONE))
        _write_pdf(figure, place / f"{card.name}.pdf")
    write_text(place / CURVES, curves_csv(shown))


def curves_csv(cards: Sequence[Card]) -> str:
    """Return the numbers of all curves in full precision, a line per point; `band` says what low and high are of."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for card in cards:
        for panel, curves in card.chart.panels if card.chart else ():
            for curve in curves:
                ends = curve.band_ends if curve.bands else [("", "")] * len(curve.xs)
                band = f"95% interval of the difference to {curve.rival}" if curve.rival else "standard deviation"
                for x, mean, (low, high) in zip(curve.xs, curve.means, ends, strict=True):
                    lines.writerow([card.name, panel, curve.name, x, mean, low, high, band if curve.bands else ""])
    return text.getvalue()


def _write_pdf(figure: Figure, file: Path) -> None:
    """Write it as `svg` has left its texts."""
    with refusals_of_disk(file.parent), replacing(file) as opened, rc_context(ALONE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(opened, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})

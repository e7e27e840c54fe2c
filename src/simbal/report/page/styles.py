"""The look of each arm in all figures: a colour and a marker by its name, whatever other arms a study has.

A style numbers a look: one of ten colours with a marker of its own, as a line or, from the tenth on, dashed.
References: Okabe and Ito, "Color Universal Design", for the first colours; all ten are at least 14 apart (CIE 1976) to
full sight and, by Machado, Oliveira and Fernandes 2009, to protanopes, deuteranopes and tritanopes.
"""

from collections.abc import Sequence
from typing import Any

COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#b8548c", "#8f6bff", "#6b3f1d", "#1f1f1f", "#332288", "#882255", "#7a2fb8",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">")
NUM_STYLES = 2 * len(COLORS)
MOST_ARMS = 12  # of a figure; more lines are a thicket
KNOWN = (
    "lbl", "simbal", "lf", "none", "frozen", "ortho_init", "uniform", "lf_simbal", "lf_lbl", "ortho_mix",
    "lbl_olmoe", "ortho_param", "lf_frozen", "hash", "offdiag_cosine", "row_norm", "lbl_listing", "lbl_hf", "quantile",
    "sinkhorn",
)  # fmt: skip


def styles(names: Sequence[str]) -> list[int]:
    """Return the style of each arm, all different; its name begins with its balancing.

    A strategy in `KNOWN` has its place there as style, in every study. Where several arms have one balancing, it is
    that of the arm with no more to its name, or of the first. All others get what is left, in their order.

    Args:
        names: of at most `NUM_STYLES` arms.
    """
    found: dict[str, int] = {}
    for name in sorted(names, key=lambda name: " " in name):  # stable: those of one word first
        kind = name.partition(" ")[0]
        if kind in KNOWN and KNOWN.index(kind) not in found.values():
            found[name] = KNOWN.index(kind)
    free = iter([style for style in range(NUM_STYLES) if style not in found.values()])
    return [found[name] if name in found else next(free) for name in names]


def color(style: int) -> str:
    """Return the colour of a style."""
    return COLORS[style % len(COLORS)]


def look(style: int) -> dict[str, Any]:
    """Return the arguments of matplotlib's lines for a style."""
    return {
        "color": color(style),
        "marker": MARKERS[style % len(MARKERS)],
        "linestyle": "-" if style < len(COLORS) else (0, (4, 2)),
    }

"""The analysis `gram_quanta`: the rounding steps of a bf16 product in the paper's layer-wise (R^T R - I)^2.

A router of almost orthonormal rows has a Gram matrix whose diagonal rounds to 1 in bf16, or to a neighbour of 1. The
neighbour below is 2^-8 away and adds (2^-8)^2 / E^2 to the mean of the squares: one quantum, 2^-26 for 32 experts. The
neighbour above is 2^-7 away and adds four. So a value of the tables is a whole number of quanta and a small rest.

Reference: arXiv 2506.14038, tables 3, 9 and 10; that its product is in bf16 is inferred from these digits.
"""

from collections.abc import Sequence
from math import floor, sqrt
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from simbal.analysis.shared.finding import Finding, numbers_table

NUM_EXPERTS = 32
QUANTUM = (2**-8) ** 2 / NUM_EXPERTS**2


class Model(NamedTuple):
    """A model of the paper: (R^T R - I)^2 of every layer, under either loss, and the main text's means."""

    simbal: Sequence[float]
    lbl: Sequence[float]
    main_text: tuple[str, str] | None  # SimBal, LBL; as printed in table 3


PAPER = {
    "MoE-M (table 9)": Model(
        simbal=(
            1.94017e-10, 1.70156e-10, 1.91267e-10, 1.89254e-10, 1.50925e-08, 2.99727e-08, 1.82301e-10, 1.73648e-10,
        ),
        lbl=(0.00146701, 0.01486, 0.0155954, 0.0102319, 0.0100937, 0.0143029, 0.020765, 0.0258847),
        main_text=None,
    ),
    "MoE-L (table 10)": Model(
        simbal=(
            1.49951e-08, 1.00854e-10, 1.03228e-10, 4.47955e-08, 1.5001e-08, 9.38376e-11, 1.16159e-10, 2.99078e-08,
            4.47949e-08, 2.99088e-08, 5.97087e-08, 1.49907e-08,
        ),
        lbl=(
            0.0125956, 0.027788, 0.0183506, 0.0128958, 0.00668315, 0.00399825, 0.00375414, 0.00736187, 0.0200508,
            0.0377724, 0.083971, 0.138501,
        ),
        main_text=("2.121e-8", "0.0311"),
    ),
}  # fmt: skip


def decode(value: float) -> tuple[int, float]:
    """Return the number of whole quanta in `value`, and the rest."""
    quanta = floor(value / QUANTUM)
    return quanta, value - quanta * QUANTUM


def gram_quanta() -> Finding:
    """Decode every SimBal value of both tables, and compare their means with the main text's."""
    return Finding(
        tables=[_table(name, model) for name, model in PAPER.items()],
        notes=[
            f"k counts quanta of (2^-8)^2 / {NUM_EXPERTS}^2 = {QUANTUM:.5e}: a diagonal entry of the bf16 product that "
            "is one step below 1 adds one quantum, one step above 1 adds four.",
            _meaning(),
        ],
        record={
            "definition": "k = floor(value / quantum), residual = value - k * quantum",
            "source": "arXiv 2506.14038, tables 3, 9 and 10",
            "quantum": QUANTUM,
            "models": {name: _record(model) for name, model in PAPER.items()},
        },
    )


def _meaning() -> str:
    values = [value for model in PAPER.values() for value in model.simbal]
    rests = [decode(value)[1] for value in values]
    share = 1 - sum(rests) / sum(values)
    return (
        f"{share:.1%} of what the tables print for SimBal is the rounding of a few diagonal entries, not an error of "
        f"the angles between rows: without it every layer has {min(rests):.1e} to {max(rests):.1e}, "
        f"entries off by {sqrt(min(rests)):.1e} to {sqrt(max(rests)):.1e} in root mean square."
    )


def _table(name: str, model: Model) -> Table:
    decoded = [decode(value) for value in model.simbal]
    rows = [
        [str(layer), f"{simbal:.5e}", str(quanta), f"{rest:.2e}", f"{lbl:g}"]
        for layer, (simbal, (quanta, rest), lbl) in enumerate(zip(model.simbal, decoded, model.lbl, strict=True))
    ]
    share, rest = f"{sum(quanta for quanta, _ in decoded)}/{len(decoded)}", fmean(rest for _, rest in decoded)
    last = [["mean", f"{fmean(model.simbal):.5e}", share, f"{rest:.2e}", f"{fmean(model.lbl):g}"]]
    if model.main_text:
        last.append(["table 3", model.main_text[0], "", "", model.main_text[1]])
    headings = ("layer", "SimBal", "k", "residual", "LBL")
    return numbers_table(f"{name}: (R^T R - I)^2 by layer", headings, rows, last)


def _record(model: Model) -> dict[str, object]:
    decoded = [decode(value) for value in model.simbal]
    return {
        "simbal": model.simbal,
        "quanta": [quanta for quanta, _ in decoded],
        "residuals": [residual for _, residual in decoded],
        "lbl": model.lbl,
        "mean_simbal": fmean(model.simbal),
        "mean_lbl": fmean(model.lbl),
    }

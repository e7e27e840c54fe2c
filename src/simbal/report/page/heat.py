"""The load of each expert over training as small images, one for each layer: a row is an expert, a column a validation.

Shapes: L MoE layers, E experts, T validations.
"""

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simbal.report.page.chart import spread
from simbal.report.page.figures import checked_counts, load_colors, relative
from simbal.report.page.series import History, ShownArm

KEY = "val/tokens_per_expert"
MOST_LAYERS = 12  # of an arm
MOST_CELLS = 40_000  # of all images; at most a byte each
SHADES = 32  # as many below the even load as above


@dataclass(frozen=True)
class HeatMap:
    """The load in one run of an arm."""

    arm: str
    name: str  # with the seed
    layers: list[tuple[int, str]]  # the layer's index, and its image as a data: address
    num_experts: int
    tokens: tuple[int, int]  # of the first and the last column
    left_out: str = ""  # a sentence on what is not shown


@dataclass(frozen=True)
class _Loads:
    arm: str
    name: str
    rows: list[dict[str, Any]]
    loads_TLE: list[list[list[float]]]


def heat_maps(arms: Sequence[ShownArm]) -> tuple[list[HeatMap], float]:
    """Return the map of each arm's first run that has recorded the load, and the load of the darkest shade."""
    found = [_loads(arm.name, history) for arm in arms for history in _first(arm)]
    largest = max((load for each in found for loads_LE in each.loads_TLE for E in loads_LE for load in E), default=0.0)
    largest = max(2.0, largest)
    rows = sum(min(MOST_LAYERS, len(each.loads_TLE[0])) * len(each.loads_TLE[0][0]) for each in found)
    return [_map(each, largest, max(2, MOST_CELLS // max(1, rows))) for each in found], largest


def scale() -> str:
    """Return the image of all shades, from no load to the darkest."""
    return _png([[*range(SHADES)]])


def _first(arm: ShownArm) -> list[History]:
    return [history for history in arm.histories if any(KEY in row.get("layers", {}) for row in history.rows)][:1]


def _loads(name: str, history: History) -> _Loads:
    rows = [row for row in history.rows if KEY in row.get("layers", {})]
    counts_TLE = [checked_counts(row["layers"][KEY], history.run) for row in rows]
    shape = [len(counts_E) for counts_E in counts_TLE[-1]]
    whole = [
        (row, counts_LE) for row, counts_LE in zip(rows, counts_TLE, strict=True) if [*map(len, counts_LE)] == shape
    ]
    loads_TLE = [[relative(counts_E) for counts_E in counts_LE] for _, counts_LE in whole]
    return _Loads(name, f"{name} seed={history.run.seed}", [row for row, _ in whole], loads_TLE)


def _map(found: _Loads, largest: float, most_columns: int) -> HeatMap:
    num_layers, num_experts = len(found.loads_TLE[0]), len(found.loads_TLE[0][0])
    times, layers = spread(len(found.rows), most_columns), spread(num_layers, MOST_LAYERS)
    images = []
    for layer in layers:
        loads_TE = [found.loads_TLE[time][layer] for time in times]
        images.append((layer, _png([[_shade(load, largest) for load in row] for row in zip(*loads_TE, strict=True)])))
    left_out = [f"{len(layers)} of {num_layers} layers"] if len(layers) < num_layers else []
    left_out += [f"{len(times)} of {len(found.rows)} validations"] if len(times) < len(found.rows) else []
    ends = (found.rows[times[0]]["tokens"], found.rows[times[-1]]["tokens"])
    return HeatMap(found.arm, found.name, images, num_experts, ends, ", ".join(left_out))


def _shade(load: float, largest: float) -> int:
    """Return the place of a load in the palette: the lower half is below the even load, 1."""
    half = SHADES // 2
    if load < 1:
        return int(load * half)
    return min(SHADES - 1, half + int((load - 1) / (largest - 1) * half))


def _png(shades: Sequence[Sequence[int]]) -> str:
    """Return an image of one byte a pixel, and the palette, as a data: address."""
    size = struct.pack(">IIBBBBB", len(shades[0]), len(shades), 8, 3, 0, 0, 0)
    palette = b"".join(load_colors(SHADES))
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in shades), 9)
    parts = ((b"IHDR", size), (b"PLTE", palette), (b"IDAT", pixels), (b"IEND", b""))
    image = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return f"data:image/png;base64,{b64encode(image).decode()}"

"""How the tokens of the validation split spread over the experts of each arm.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from simbal.page.series import ShownArm, broken, number
from simbal.table.collect import Run


@dataclass(frozen=True)
class LoadMap:
    """Load of the experts of an arm by the even load 1, each layer's from the most used expert to the least."""

    name: str
    loads_LE: list[list[float]]


def loads(arms: Sequence[ShownArm]) -> list[LoadMap]:
    """Of the arms whose runs have recorded it; mean over seeds of each layer's most used expert, of its second, ..."""
    maps = []
    for arm in arms:
        counts = [counts for history in arm.histories if (counts := _counts(history.run))]
        shapes = {(len(counts_LE), *map(len, counts_LE)) for counts_LE in counts}
        if len(shapes) == 1:
            sorted_loads = [[_relative(counts_E) for counts_E in counts_LE] for counts_LE in counts]
            means = [[fmean(same) for same in zip(*layers, strict=True)] for layers in zip(*sorted_loads, strict=True)]
            maps.append(LoadMap(arm.name, means))
    return maps


def _relative(counts_E: list[int]) -> list[float]:
    even = sum(counts_E) / len(counts_E)
    return [count / even if even else 0.0 for count in sorted(counts_E, reverse=True)]


def _counts(run: Run) -> list[list[int]] | None:
    """Tokens per expert on the validation split: the run's own, or else those of the analysis `routing`."""
    for layers in (run.result.get("layers", {}), run.analyses.get("routing", {}).get("layers", {})):
        for key in ("load/tokens_per_expert", "tokens_per_expert"):
            if isinstance(layers, dict) and key in layers:
                counts: list[list[int]] = layers[key]
                try:
                    if all(counts_E and all(number(n, run) >= 0 for n in counts_E) for counts_E in counts):
                        return counts
                except TypeError:
                    pass
                raise broken(run)
    return None

"""How far an arm's loss lies above others', by the tokens that its experts have seen: over studies of several budgets.

A study's table holds runs of one length. These figures hold several studies, which differ in nothing but that.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from simbal.errors import UserError
from simbal.report.page.series import Curve
from simbal.report.page.styles import MOST_ARMS
from simbal.report.reproduce.drawing import GAP
from simbal.report.reproduce.rows import PER_PARAMETER, ROWS, ArmRows, read_rows
from simbal.report.statistics import standard_deviation

LOSS, EXPERTS = "val/loss", "num_experts"
DENSE = "dense"  # a rival: the model without experts that is as large as what a token passes through
Gap = tuple[float, list[float]]  # tokens per expert parameter, and the difference on each seed


def budgets(config: Mapping[str, Any], results: Path) -> dict[str, list[Curve]]:
    """Return the figures of a group of studies: a line for each setting, over the studies that have it.

    Args:
        config: a value of `scale.budgets`: `of`, names of studies; `arm`, a balancing; `rivals`, others or `dense`.
        results: the folder of the studies.

    Raises:
        UserError: a rows.csv is not there or broken, or there are more settings than can be told apart.
    """
    studies, figures = [_arms(results / name) for name in config["of"]], {}
    for rival in config["rivals"]:
        found: dict[str, list[Gap]] = defaultdict(list)
        for arms in studies:
            for setting, gap in _gaps(arms, config["arm"], rival):
                found[setting].append(gap)
        if len(found) > MOST_ARMS:
            raise UserError(
                f"{', '.join(config['of'])} have {len(found)} settings, of which a figure shows {MOST_ARMS}"
            )
        lines = enumerate(found.items())
        figures[GAP + rival] = [_line(setting, style, sorted(gaps)) for style, (setting, gaps) in lines]
    return figures


def _arms(folder: Path) -> list[ArmRows]:
    arms = read_rows(folder)
    if arms is None:
        raise UserError(f"there is no {folder / ROWS}: reproduce the study first")
    return arms


def _gaps(arms: Sequence[ArmRows], of: str, rival: str) -> Iterator[tuple[str, Gap]]:
    """Yield the setting of each arm of a balancing, and its paired differences to the rival's in that setting."""
    balancing, dense = ("none", True) if rival == DENSE else (rival, False)
    others = {arm.setting: arm.values(LOSS) for arm in arms if arm.balancing == balancing}
    for arm in arms:
        theirs = others.get(_dense(arm.setting) if dense else arm.setting, {})
        both = [loss - theirs[seed] for seed, loss in arm.values(LOSS).items() if seed in theirs]
        if arm.balancing == of and both and (per_parameter := [*arm.values(PER_PARAMETER).values()]):
            yield arm.setting, (per_parameter[0], both)


def _dense(setting: str) -> str:
    """Return the setting of the dense model of the same active size."""
    parts = (part.partition("=") for part in setting.split())
    return " ".join(f"{key}={0 if key.endswith(EXPERTS) else value}" for key, _, value in parts)


def _line(setting: str, style: int, gaps: Sequence[Gap]) -> Curve:
    name = setting.replace("model.", "")
    sds = [standard_deviation(values) for _, values in gaps] if all(len(values) > 1 for _, values in gaps) else None
    return Curve(name, style, [x for x, _ in gaps], [fmean(values) for _, values in gaps], sds)

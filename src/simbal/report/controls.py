"""The controls of a table: arms whose router learns nothing, which learnt routers have to beat."""

from collections.abc import Sequence

from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm, listed
from simbal.report.comparison import differences
from simbal.report.conclusion import ALPHA
from simbal.report.statistics import holm

CONTROLS = {f"simbal.balancing.controls.{name}" for name in ("FrozenRouter", "HashRouting", "UniformRouting")}


def is_control(arm: Arm) -> bool:
    """Whether one of its strategies is a control: a frozen router, experts drawn at random or fixed by the token."""
    strategies = arm.runs[0].spec.config.balancing.values()
    return any(isinstance(keys, dict) and str(keys.get("_target_")) in CONTROLS for keys in strategies)


def of_controls(arms: Sequence[Arm], metrics: Sequence[Metric]) -> list[str]:
    """Return a note if no arm is a control, or for each that is not significantly worse than some learnt router.

    A control is compared with those that are like it in all else; with all, where there are none.

    Args:
        arms: all that the table has; those of dense models have no router.
        metrics: the columns, of which the first loss or perplexity decides.
    """
    routed = [arm for arm in arms if arm.runs[0].spec.config.model.num_experts]
    controls = [arm for arm in routed if is_control(arm)]
    if len(routed) > 1 and not controls:
        return [
            "No arm is a control: without a router that learns nothing, such as balancing=frozen, the table cannot "
            "say how much of these numbers learnt routing gives."
        ]
    decisive = next((metric for metric in metrics if metric.margin and metric.compared), None)
    if decisive is None:
        return []
    learnt = [arm for arm in routed if not is_control(arm)]
    notes = []
    for control in controls:
        alike = [arm for arm in learnt if arm.setting == control.setting]
        if unbeaten := _not_worse_than(control, alike or learnt, decisive):
            notes.append(
                f"{control.name}, a control, is not significantly worse in {decisive.title} than "
                f"{listed(unbeaten)}: the table does not show that learning the router helps there."
            )
    return notes


def _not_worse_than(control: Arm, learnt: Sequence[Arm], metric: Metric) -> list[str]:
    """Return the names of the learnt routers that paired t tests, corrected by Holm, do not find to be better."""
    found = [(arm, differences(control, arm, [metric]).get(metric.key)) for arm in learnt]
    tested = [(arm, one.mean, one.p) for arm, one in found if one and one.p is not None]
    corrected = holm([p for _, _, p in tested])
    beaten = {arm.name for (arm, mean, _), p in zip(tested, corrected, strict=True) if mean > 0 and p < ALPHA}
    return [arm.name for arm in learnt if arm.name not in beaten]

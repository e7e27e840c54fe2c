"""The notes below a table: why an arm is not compared, what so few seeds cannot say, and what the numbers mean."""

from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

from simbal.metrics.definitions import Metric
from simbal.report.arms import MOST_NAMED, Arm, listed, seed_spans
from simbal.report.collect import Run
from simbal.report.comparison import Row, differences, rivals
from simbal.report.conclusion import ALPHA
from simbal.report.models import MeasuredModel, notes_on_models
from simbal.report.paper import NOTE
from simbal.report.statistics import PairedDifference, holm, relative
from simbal.report.table import Table
from simbal.report.tokens_to_loss import PAPER_SAVING

SMALL_SAMPLE = 5  # pairs; with 6 a sign-flip test can reach p = 0.031
FEW_VALIDATIONS = 10
SAME_COMPUTE = 0.01  # by which experts per token may differ, as they do at random where their number varies
CONTROLS = {  # strategies by which a router learns nothing
    f"simbal.balancing.controls.{name}" for name in ("FrozenRouter", "HashRouting", "UniformRouting")
}


@lru_cache(maxsize=1)  # four renderings have the same, which of very many runs take a while
def notes(table: Table) -> list[str]:
    """Return all notes of a table in their order, each one or more sentences."""
    return remarks(table) + explanations(table)


def remarks(table: Table) -> list[str]:
    """Return the notes on what is particular to this table: what it does not compare, and what it cannot say."""
    return [
        *([] if table.pairs or not table.rows else why_no_difference(table.rows, table.baseline)),
        *_of_seeds(table.rows, _compared(table)),
        *_of_tokens(table.rows, table.baseline),
        *of_controls([row.arm for row in table.rows], table.metrics),
        *_of_compute([row.arm for row in table.rows]),
        *_of_runs(table.rows),
        *notes_on_models(table.models),
    ]


def explanations(table: Table) -> list[str]:
    """Return the notes on how the numbers of a table are defined and compared."""
    return [
        *_of_tests(_compared(table), "pairs of arms" if table.pairs else "arms that are compared"),
        *_of_conclusions(_compared(table), table.margin),
        *_of_slopes(table.rows, table.baseline),
        *(of_paper(table.rows) if table.paper else []),
        *_definitions([*(run for row in table.rows for run in row.arm.runs), *table.models], table.metrics),
    ]


def _compared(table: Table) -> list[PairedDifference]:
    return [difference for row in table.compared for difference in row.differences.values()]


def why_no_difference(rows: Sequence[Row], baseline: str | None) -> list[str]:
    """Return one sentence for each reason that an arm is not compared."""
    if baseline is None:
        return ["No difference is shown: the runs name several baselines; choose one with baseline=."]
    if len(rows) > 1 and all(row.arm.answers_to(baseline) for row in rows):
        return [f"No difference is shown: every arm is the baseline, {baseline}."]

    def apart(arm: Arm, found: Sequence[Arm]) -> bool:
        return len(found) == 1 and not {*arm.seeds} & {*found[0].seeds}

    arms = [row.arm for row in rows]
    others = [
        (row.arm, found)
        for row, found in zip(rows, rivals(arms, baseline), strict=True)
        if not row.arm.answers_to(baseline) and not row.differences
    ]
    reasons = (
        (
            [arm.name for arm, found in others if not found],
            f"no finished run has balancing={baseline}, the baseline, and all else the same (baseline= takes any arm)",
        ),
        ([arm.name for arm, found in others if len(found) > 1], f"several arms are the baseline, balancing={baseline}"),
        ([arm.name for arm, found in others if apart(arm, found)], "it shares no seed with the baseline"),
        (
            [arm.name for arm, found in others if len(found) == 1 and not apart(arm, found)],
            "the table has no number that is compared and that both have",
        ),
    )
    return [f"No difference is shown for {listed(names)}: {why}." for names, why in reasons if names]


def of_paper(rows: Sequence[Row]) -> list[str]:
    """Return a note on the paper's columns beside ours, or that there are none."""
    if any(row.reported for row in rows):
        return [NOTE]
    return ["The paper reports none of these columns for these strategies."]


def _definitions(measured: Sequence[Run | MeasuredModel], metrics: Sequence[Metric]) -> list[str]:
    """Return what the numbers mean, as the runs and models themselves say it."""
    definitions = {key: text for one in measured for key, text in one.definitions.items()}
    return [f"{metric.title}: {definitions[metric.key]}." for metric in metrics if metric.key in definitions]


def _of_runs(rows: Sequence[Row]) -> list[str]:
    """Return notes on which data the runs were trained on, how much, and whether a look has ended their seeds."""
    finished = [run for row in rows for run in row.arm.runs]
    if not finished:
        return []
    notes = []
    if any(run.spec.config.until == "decided" for run in finished):
        notes.append(
            "The seeds ended where a look decided every arm (until=decided): intervals and p here are not corrected "
            "for the looks; what the sweep has printed of each arm is."
        )
    records = [run.result for run in finished]
    steps, tokens = (_range([record[key] for record in records]) for key in ("steps", "tokens"))
    source, fingerprint = finished[0].spec.config.data.source, records[0]["data"]["tokens"]
    notes.append(f"{steps} steps and {tokens} tokens per run; data {source}, tokens {fingerprint[:16]}.")
    return notes


def _of_compute(arms: Sequence[Arm]) -> list[str]:
    """Return a note if a token goes to more experts in one arm than in another; runs of old versions all went to K."""
    used = {}
    for arm in arms:
        model = arm.runs[0].spec.config.model
        if model.num_experts:
            values = arm.values("val/experts_per_token").values()
            used[arm.name] = fmean(values) if values else float(model.top_k)
    if not used or max(used.values()) <= (1 + SAME_COMPUTE) * min(used.values()):
        return []
    experts = listed([f"{number:.2f} in {name}" for name, number in used.items()])
    return [f"Arms differ in compute: a token goes to {experts} experts on average."]


def _of_seeds(rows: Sequence[Row], differences: Sequence[PairedDifference]) -> list[str]:
    notes = []
    pairs = {difference.pairs for difference in differences}
    if 1 in pairs or any(len(row.arm.runs) == 1 for row in rows):
        notes.append("One seed has no standard deviation, and one pair of seeds no interval and no p: a dash.")
    if 2 in pairs:
        notes.append(
            "A t test of 2 pairs has 1 degree of freedom: its interval reaches 12.7 standard errors to either side, "
            "where that of 5 pairs reaches 2.8."
        )
    largest = max(pairs or {len(row.arm.runs) for row in rows}, default=0)
    if 2 <= largest <= SMALL_SAMPLE:
        notes.append(
            f"{largest} seeds are few: intervals and p lean on the differences being normal, and a sign-flip or "
            f"Wilcoxon test of {largest} pairs cannot give p below {2 / 2**largest:.4g}. Six seeds (seed=0-5) can "
            "reach 0.05."
        )
    return notes


def _of_tests(differences: Sequence[PairedDifference], corrected: str) -> list[str]:
    """Return notes on what the tests are, what they are `corrected` for, and what not."""
    if not differences:
        return []
    notes = ["Intervals are 95% each, not corrected for how many there are."]
    if documents := {one.over_documents.documents for one in differences if one.over_documents}:
        notes.append(
            "The 95% interval is about other seeds on the same validation documents, the one over documents about "
            f"other documents for the same seeds (a bootstrap of the {_range([*documents])} that there are): neither "
            "has both."
        )
    if any(difference.scale == "ln" for difference in differences):
        notes.append(
            "A difference in percent is that of the geometric means: mean, interval and tests are of logarithms."
        )
    if any(difference.p is not None for difference in differences):
        notes.append(
            "p is two-sided, of the paired t test; d_z is the mean of the differences by their standard deviation; "
            "Welch p is of the t test of unequal variances over all seeds of both arms."
        )
    if any(difference.p_holm is not None for difference in differences):
        notes.append(f"p (Holm) is corrected for the {corrected} by one metric, not for several metrics.")
    if any(difference.pairs > 1 and difference.p is None for difference in differences):
        notes.append(
            "Where every seed gives the same difference, no noise was measured to test it against: interval, p and d_z "
            "are dashes."
        )
    return notes


def _of_conclusions(differences: Sequence[PairedDifference], margin: float | None) -> list[str]:
    """Return two sentences on what the words and the detectable differences mean."""
    if not any(difference.sd for difference in differences):
        return []
    equivalent = (
        f"the arms are equivalent if a test at 5% (TOST) shows that a loss differs by less than {margin:g} nats per "
        f"token, a perplexity by {relative(margin):.1%} (equivalence_margin)"
        if margin is not None
        else "none are equivalent, as the runs name several margins (choose one with equivalence_margin=)"
    )
    return [
        "An arm is better or worse (higher or lower where neither is good) if p, or p (Holm) where there is one, is "
        f"below 0.05; else {equivalent}; else the difference is not resolved.",
        "Detectable is the true difference that so many pairs with this spread show at p < 0.05 with 80% power: an arm "
        "whose difference is not resolved may well be better or worse by less.",
    ]


def _of_tokens(rows: Sequence[Row], baseline: str | None) -> list[str]:
    """Return notes on losses not reached, on the paper's saving of tokens, and on too few validations."""
    found = [(row.arm.name, row.tokens_to_loss) for row in rows if row.tokens_to_loss]
    missed = [
        f"{name} has not reached {baseline}'s final validation loss in {len(tokens.missed)} of {len(tokens.shares)} "
        f"seeds (seed={seed_spans(tokens.missed)}); a mean without them would flatter it, so none is given."
        for name, tokens in found
        if tokens.missed
    ]
    saved = []
    for name, tokens in found:
        _, low, high = tokens.by_slope.shares if tokens.by_slope else (None, None, None)
        if low is not None and high is not None:
            within = "includes" if low <= PAPER_SAVING <= high else "excludes"
            saved.append(
                f"{name}'s interval of the tokens saved by slope, {low:+.1%} to {high:+.1%}, {within} the paper's "
                f"{PAPER_SAVING:.0%}."
            )
    notes = [*_first(missed), *_first(saved)]
    fewest = min((tokens.validations for _, tokens in found), default=FEW_VALIDATIONS)
    if fewest < FEW_VALIDATIONS:
        notes.append(
            f"Tokens to a loss are read off straight lines between validations, of which there are {fewest}: more of "
            "them (trainer.val_every) make it exact."
        )
    return notes


def _first(notes: Sequence[str]) -> list[str]:
    """Return the first of notes that are of an arm each, and how many more there are."""
    more = len(notes) - MOST_NAMED
    said = [f"{more:,} more arms have a note like this one; the table has their numbers."] if more > 0 else []
    return [*notes[:MOST_NAMED], *said]


def _of_slopes(rows: Sequence[Row], baseline: str | None) -> list[str]:
    """Return how tokens are saved by slope."""
    if not any(row.tokens_to_loss and row.tokens_to_loss.by_slope for row in rows):
        return []
    return [
        f"Saved by slope is the tokens that {baseline} would need at the slope which its loss has at the end, against "
        "ln tokens (the last half in ln tokens, at least three validations), to change by the final difference."
    ]


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


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

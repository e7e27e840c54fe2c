"""The notes below a table: facts about the runs, why arms are not compared, limits of few seeds, definitions."""

from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm, join_names, seed_ranges
from simbal.report.comparison import Row, differences
from simbal.report.paper import NOTE, NOTHING_REPORTED
from simbal.report.statistics import ALPHA, holm, relative, student_quantile
from simbal.report.table import Table
from simbal.report.tokens_to_loss import PAPER_SAVING

FEW_PAIRS = 5  # with six pairs a sign-flip test can reach p = 0.031
FEW_VALIDATIONS = 10
SAME_COMPUTE = 0.01  # smaller relative differences of experts per token are random variation
CONTROLS = {  # strategies without learned routing
    f"simbal.balancing.controls.{name}" for name in ("FrozenRouter", "HashRouting", "UniformRouting")
}


@lru_cache(maxsize=1)  # four renderings show the same notes
def notes(table: Table) -> list[str]:
    """Return all notes of a table in order, each one or more sentences."""
    return remarks(table) + explanations(table)


def remarks(table: Table) -> list[str]:
    """Return the notes on this table's runs, the most important first."""
    arms = [row.arm for row in table.rows]
    return [
        *_about_runs(table.rows),
        *([] if table.pairs or not arms else why_not_compared(table.rows, table.baseline)),
        *_about_compute(arms),
        *about_controls(arms, table.metrics),
        *_about_seeds(table),
        *_about_tokens(table.rows, table.baseline),
        *_about_models(table),
    ]


def explanations(table: Table) -> list[str]:
    """Return the notes on how numbers are defined and compared."""
    compared = [difference for row in table.compared for difference in row.differences.values()]
    documents = [one.over_documents.documents for one in compared if one.over_documents]
    pairs = "pairs of arms" if table.pairs else "arms"
    margin = table.margin
    if margin is None:
        equivalent = "never equivalent, as the runs have different margins (choose one with equivalence_margin=)"
    else:
        equivalent = (
            f"equivalent if a test at 5% (TOST) shows that a loss differs by less than {margin:g} nats per token, or a "
            f"perplexity by {relative(margin):.1%} (equivalence_margin)"
        )
    several = any(one.p_holm is not None for one in compared)
    constant = any(one.pairs > 1 and one.p is None for one in compared)
    tested, ratios = any(one.sd for one in compared), any(one.scale == "ln" for one in compared)
    texts = {
        "Each interval is a 95% interval, not corrected for multiple comparisons.": compared,
        "The 95% interval covers variation over seeds on the same validation documents. The interval over documents "
        f"covers variation over documents for the same seeds (bootstrap of {_range(documents)}). Neither covers "
        "both.": documents,
        "Differences in percent are ratios of geometric means; tests and intervals use logarithms.": ratios,
        "p is two-sided, from the paired t test; it and the interval assume normally distributed differences. d_z is "
        "the mean of the differences divided by their standard deviation. Welch p is from the t test with unequal "
        "variances over all seeds of both arms.": tested,
        f"p (Holm) is corrected for the number of {pairs}, not for the number of metrics.": several,
        "If all seeds have the same difference, there is no measured noise: interval, p and d_z are dashes.": constant,
        "An arm is better or worse (higher or lower if neither direction is good) if p, or p (Holm) if there is one, "
        f"is below 0.05; otherwise {equivalent}; otherwise not resolved.": tested,
        "Detectable is the true difference that this test detects with 80% power. A difference that is not resolved "
        "may exist but be smaller.": tested,
    }
    measured = [*(run for row in table.rows for run in row.arm.runs), *table.models]
    definitions = {key: text for one in measured for key, text in one.definitions.items()}
    return [
        *(text for text, applies in texts.items() if applies),
        *_about_slopes(table.rows, table.baseline),
        *([NOTE if any(row.reported for row in table.rows) else NOTHING_REPORTED] if table.paper else []),
        *(f"{metric.title}: {definitions[metric.key]}." for metric in table.metrics if metric.key in definitions),
    ]


def why_not_compared(rows: Sequence[Row], baseline: str | None) -> list[str]:
    """Return a sentence that names the arms without a difference from the baseline, and the reason."""
    if baseline is None:
        return ["No differences: the runs have different baselines; choose one with baseline=."]
    names = [row.arm.name for row in rows if not row.differences and not row.arm.is_baseline(baseline)]
    if not names:
        return []
    return [
        f"No difference for {join_names(names)}: a comparison needs exactly one arm with balancing={baseline}, an "
        "otherwise equal config and a shared seed (baseline= also takes the name of an arm)."
    ]


def is_control(arm: Arm) -> bool:
    """Whether one of the arm's strategies is a control, that is, has no learned routing."""
    strategies = arm.runs[0].spec.config.balancing.values()
    return any(isinstance(keys, dict) and str(keys.get("_target_")) in CONTROLS for keys in strategies)


def about_controls(arms: Sequence[Arm], metrics: Sequence[Metric]) -> list[str]:
    """Return a note if no arm is a control, or for each control that is not significantly worse than a learned router.

    A control is compared with the arms of otherwise equal config, or with all arms if no config matches, in the first
    loss or perplexity of the table.
    """
    routed = [arm for arm in arms if arm.runs[0].spec.config.model.num_experts]
    controls = [arm for arm in routed if is_control(arm)]
    learned = [arm for arm in routed if not is_control(arm)]
    if len(routed) > 1 and not controls:
        return ["No control: add balancing=frozen to measure the benefit of learned routing."]
    metric = next((metric for metric in metrics if metric.margin and metric.compared), None)
    notes = []
    for control in controls if metric else []:
        assert metric
        alike = [arm for arm in learned if arm.setting == control.setting]
        if unbeaten := _not_significantly_better(control, alike or learned, metric):
            notes.append(
                f"The control {control.name} is not significantly worse in {metric.title} than {join_names(unbeaten)}: "
                "no benefit of learned routing is shown."
            )
    return notes


def _not_significantly_better(control: Arm, learned: Sequence[Arm], metric: Metric) -> list[str]:
    """Return the arms that are not significantly better than the control (paired t tests with Holm's correction)."""
    compared = [(arm, differences(control, arm, [metric]).get(metric.key)) for arm in learned]
    tested = [(arm, one.mean, one.p) for arm, one in compared if one and one.p is not None]
    corrected = holm([p for _, _, p in tested])
    better = {arm.name for (arm, mean, _), p in zip(tested, corrected, strict=True) if mean > 0 and p < ALPHA}
    return [arm.name for arm in learned if arm.name not in better]


def _about_runs(rows: Sequence[Row]) -> list[str]:
    """Return notes on the length and the data of the runs, and on interim looks."""
    finished = [run for row in rows for run in row.arm.runs]
    if not finished:
        return []
    records = [run.result for run in finished]
    steps, tokens = (_range([record[key] for record in records]) for key in ("steps", "tokens"))
    source, digest = finished[0].spec.config.data.source, records[0]["data"]["tokens"]
    notes = [f"{steps} steps and {tokens} tokens per run; data {source}, tokens {digest[:16]}."]
    if any(run.spec.config.until == "decided" for run in finished):
        notes.append(
            "Interim looks chose the number of seeds (until=decided). Intervals and p-values here are not corrected "
            "for the looks; the decisions printed by the sweep are."
        )
    return notes


def _about_compute(arms: Sequence[Arm]) -> list[str]:
    """Return a note if arms use different numbers of experts per token."""
    used = {}
    for arm in arms:
        model = arm.runs[0].spec.config.model
        if model.num_experts:
            values = arm.values("val/experts_per_token").values()
            used[arm.name] = fmean(values) if values else float(model.top_k)
    if not used or max(used.values()) <= (1 + SAME_COMPUTE) * min(used.values()):
        return []
    experts = join_names([f"{number:.2f} in {name}" for name, number in used.items()])
    return [f"Arms differ in compute: experts per token are {experts}."]


def _about_seeds(table: Table) -> list[str]:
    pairs = {difference.pairs for row in table.compared for difference in row.differences.values()}
    seeds = {len(row.arm.runs) for row in table.rows}
    notes = []
    if 1 in pairs | seeds:
        notes.append("A single seed has no standard deviation, and a single pair of seeds no interval and no p.")
    largest = max(pairs or seeds, default=0)
    if 2 <= largest <= FEW_PAIRS:
        notes.append(
            f"{largest} seeds are few: a 95% interval is ±{student_quantile(0.975, largest - 1):.1f} standard errors, "
            f"and a sign-flip test cannot give p below {2 / 2**largest:.4g}."
        )
    return notes


def _about_tokens(rows: Sequence[Row], baseline: str | None) -> list[str]:
    """Return notes on losses that were not reached, and on too few validations."""
    by_arm = [(row.arm.name, row.tokens_to_loss) for row in rows if row.tokens_to_loss]
    missed = [f"{name} (seed={seed_ranges(tokens.missed)})" for name, tokens in by_arm if tokens.missed]
    notes = []
    if missed:
        notes.append(
            f"{join_names(missed)} did not reach the final validation loss of {baseline}: no mean saving is shown, as "
            "it would be biased."
        )
    fewest = min((tokens.validations for _, tokens in by_arm), default=FEW_VALIDATIONS)
    if fewest < FEW_VALIDATIONS:
        notes.append(
            f"Tokens to a loss are interpolated between {fewest} validations; a smaller trainer.val_every makes them "
            "more accurate."
        )
    return notes


def _about_models(table: Table) -> list[str]:
    """Return notes on comparing models, and on the data and settings of each model."""
    notes = ["Models have different tokenizers: compare bits per byte on the same text, not losses or perplexities."]
    for model in table.models:
        data = model.facts["data"]
        notes.append(
            f"{model.name}: {model.facts['source']}, data {data['source']}, tokens {data['tokens'][:12]} from its own "
            f"tokenizer, {model.facts['context']:,} per window, {model.facts['dtype']}."
        )
    return notes if table.models else []


def _about_slopes(rows: Sequence[Row], baseline: str | None) -> list[str]:
    """Return notes on the computation of tokens saved by slope, and on arms consistent with the paper's saving."""
    slopes = {row.arm.name: row.tokens_to_loss.by_slope for row in rows if row.tokens_to_loss}
    ends = {name: slope.shares[1:] for name, slope in slopes.items() if slope}
    known = {name: (low, high) for name, (low, high) in ends.items() if low is not None and high is not None}
    includes = [name for name, (low, high) in known.items() if low <= PAPER_SAVING <= high]
    excludes = [name for name in known if name not in includes]
    contains = f"of tokens saved by slope includes the paper's {PAPER_SAVING:.0%}"
    texts = {
        f"Saved by slope: the final difference in loss, divided by the slope of {baseline}'s loss against ln tokens "
        "over the last half of its curve (at least three validations).": ends,
        f"The 95% interval {contains} for {join_names(includes)}.": includes,
        f"The 95% interval {contains.replace('includes', 'excludes')} for {join_names(excludes)}.": excludes,
    }
    return [text for text, applies in texts.items() if applies]


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

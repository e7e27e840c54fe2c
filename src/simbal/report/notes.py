"""The notes below a table: facts about the runs, why arms are not compared, limits of few seeds, definitions."""

from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm, join_names, seed_ranges
from simbal.report.comparison import BARELY, Row, compare_pairs
from simbal.report.paper import NOTE, NOTHING_REPORTED
from simbal.report.statistics import UNRESOLVED, relative
from simbal.report.table import Table
from simbal.report.tokens_to_loss import PAPER_SAVING

FEW_SEEDS = 3  # see benchmarks/error_rates.py
FEW_VALIDATIONS = 10
NGRAM_GAP = 0.3  # nats: a language model should be at least this much better than counting n-grams
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
        *_about_training(arms),
        *([] if table.pairs or not arms else why_not_compared(table.rows, table.baseline)),
        *_about_ngrams(table),
        *_about_compute(arms),
        *_about_gate_weights(arms),
        *([] if table.absent or table.missing else about_controls(arms, table.metrics)),
        *_about_seeds(table),
        *_about_pooling(table),
        *_about_tokens(table.rows, table.baseline),
        *_about_models(table),
    ]


def explanations(table: Table) -> list[str]:
    """Return the notes on how numbers are defined and compared."""
    compared = [difference for row in table.compared for difference in row.differences.values()]
    documents = [one.over_documents.documents for one in compared if one.over_documents]
    margin = table.margin
    if margin is None:
        equivalent = "never equivalent, as the runs have different margins (choose one with equivalence_margin=)"
    else:
        equivalent = (
            f"equivalent if the interval of a loss lies within ±{margin:g} nats per token, or of a perplexity within "
            f"{relative(margin):.1%} (equivalence_margin)"
        )
    of_pairs = any(one.largest and one.largest.kind == "pairs" for one in compared)
    method = "pairs (Tukey)" if of_pairs else "comparisons (Dunnett)"
    measured, ratios = any(one.pooled is not None for one in compared), any(one.scale == "ln" for one in compared)
    baselines = {id(row.other) for row in table.compared}
    arms = "arms" if table.pairs or len(baselines) < 2 else "arms with the same baseline"
    texts = {
        f"All 95% intervals of a metric are simultaneous, for all {method}. Noise is pooled over {arms} after removing "
        "the effects of arm and seed. The conclusion follows from the interval.": any(one.pooled for one in compared),
        "Intervals cover variation over seeds on the same validation documents. The interval over documents covers "
        f"variation over documents for the same seeds (bootstrap of {_range(documents)}). Neither covers "
        "both.": documents,
        "Unigram, bigram and n-gram rows: losses of models that count the n-grams of the training text and interpolate "
        "with absolute discounting.": table.ngram_losses,
        "Differences in percent are ratios of geometric means; intervals use logarithms.": ratios,
        "Better or worse (higher or lower if neither direction is good): the interval excludes 0; barely: by less than "
        f"{BARELY:g} nats. Otherwise {equivalent}, identical if all seeds have equal values, or not "
        "resolved. Perplexity and bits per byte have the conclusion of the loss.": measured,
        "p is adjusted for the number of comparisons, like the interval. p (paired) is from the paired t test of this "
        "comparison only, and Welch p from the t test with unequal variances over all seeds. d_z is the mean of the "
        "paired differences divided by their standard deviation. All assume normally distributed noise.": measured,
        "Detectable is the true difference that this comparison detects with 80% power. A difference that is not "
        "resolved may exist but be smaller.": measured,
    }
    runs = [*(run for row in table.rows for run in row.arm.runs), *table.models]
    definitions = {key: text for one in runs for key, text in one.definitions.items()}
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
    """Return a note if no arm is a control, or for each control that is not worse than a learned router.

    A control is compared with the arms of otherwise equal config, or with all arms if no config matches, in the first
    loss or perplexity of the table.
    """
    routed = [arm for arm in arms if arm.runs[0].spec.config.model.num_experts and not arm.untrained]
    controls = [arm for arm in routed if is_control(arm)]
    learned = [arm for arm in routed if not is_control(arm)]
    if len(routed) > 1 and not controls:
        return ["No control: add balancing=frozen to measure the benefit of learned routing."]
    metric = next((metric for metric in metrics if metric.margin and metric.compared), None)
    notes = []
    for control in controls if metric else []:
        assert metric
        rivals = [arm for arm in learned if arm.setting == control.setting] or learned
        compared = compare_pairs([(control, rival) for rival in rivals], [metric], None, documents=False)
        words = [differences[metric.key].conclusion if differences else UNRESOLVED for differences in compared]
        if unbeaten := [rival.name for rival, word in zip(rivals, words, strict=True) if "worse" not in word]:
            notes.append(
                f"The control {control.name} is not significantly worse in {metric.title} than {join_names(unbeaten)}: "
                "no benefit of learned routing is shown."
            )
    return notes


def _about_training(arms: Sequence[Arm]) -> list[str]:
    """Return a note on arms from which no conclusions can be drawn."""
    untrained = {arm.name: arm.untrained for arm in arms if arm.untrained}
    if not untrained:
        return []
    reason = next(iter(untrained.values()))
    return [f"No conclusions for {join_names([*untrained])}: {reason}."]


def _about_pooling(table: Table) -> list[str]:
    """Return a note on arms whose noise differs from the others in a loss or perplexity."""
    losses = [metric for metric in table.metrics if metric.margin]
    for metric in losses[:1]:
        differences = {
            row.arm.name: row.differences[metric.key] for row in table.compared if metric.key in row.differences
        }
        own = [name for name, difference in differences.items() if difference.pooled is False]
        if own and len(differences) > 1:
            return [f"Too noisy to pool in {metric.title}: {join_names(own)}; their intervals use only their own runs."]
    return []


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
            "for the looks; the decisions that the sweep prints are."
        )
    return notes


def _about_ngrams(table: Table) -> list[str]:
    """Return a note if the baseline is close to the best n-gram model, or above it."""
    baselines = [row.arm for row in table.rows if row.arm.is_baseline(table.baseline)]
    for arm in baselines[:1]:
        losses, values = arm.runs[0].ngram_losses, arm.values("val/loss").values()
        if losses and values:
            order = min(losses, key=losses.__getitem__)
            below = losses[order] - fmean(values)
            if below < NGRAM_GAP:
                where = f"{below:.2f} nats below" if below > 0 else f"{-below:.2f} nats above"
                return [
                    f"The validation loss of {arm.name} is {where} a {order}-gram model's ({losses[order]:.3f}): "
                    "differences may only show how well the arms learn n-grams."
                ]
    return []


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


def _about_gate_weights(arms: Sequence[Arm]) -> list[str]:
    """Return a note on arms whose learned router gets no gradient from the loss of tokens with one expert."""
    names = [arm.name for arm in arms if arm.runs[0].spec.config.top1_weight_is_one and not is_control(arm)]
    if not names:
        return []
    return [
        f"In {join_names(names)} a token with one expert gives it weight 1 (model.top_k=1, router.renormalize=true), "
        "so the language-model loss gives the router no gradient there."
    ]


def _about_seeds(table: Table) -> list[str]:
    pairs = {difference.pairs for row in table.compared for difference in row.differences.values()}
    seeds = {len(row.arm.runs) for row in table.rows}
    notes = []
    if 1 in pairs | seeds:
        notes.append("A single seed has no standard deviation, and a single pair of seeds no interval and no p.")
    largest = max(pairs or seeds, default=0)
    if 2 <= largest <= FEW_SEEDS:
        notes.append(
            f"{largest} seeds are few: an arm with unusual noise cannot be recognized, and then up to one table in "
            "five has a wrong conclusion."
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
    """Return notes on the computation of tokens saved by slope, and on the saving that the paper claims for SimBal."""
    slopes = {row.arm.name: row.tokens_to_loss.by_slope for row in rows if row.tokens_to_loss}
    notes = []
    if any(slopes.values()):
        notes.append(
            f"Saved by slope: the final difference in loss, divided by the slope of {baseline}'s loss against ln "
            "tokens over the last half of the tokens (at least three validations)."
        )
    for row in rows:
        of_paper = row.arm.balancing == "simbal" and row.other is not None and row.other.balancing == "lbl"
        slope = slopes.get(row.arm.name) if of_paper else None
        _, low, high = slope.shares if slope else (None, None, None)
        if low is not None and high is not None:
            verb = "includes" if low <= PAPER_SAVING <= high else "excludes"
            notes.append(
                f"The 95% interval of tokens saved by slope {verb} the paper's {PAPER_SAVING:.0%} for {row.arm.name}."
            )
    return notes


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

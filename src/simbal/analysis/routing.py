"""The analysis `routing`: how routers use their experts, how sure they are, and whether they send like tokens alike.

Reference: arXiv 2506.14038, section 4.1 and table 3 (SEU, entropy); arXiv 2408.15664 (MaxVio); router saturation as in
OLMoE, arXiv 2409.02060.
Shapes: N tokens, C pairs, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.shared.finding import Finding, numbers_table
from simbal.analysis.shared.routing_totals import (
    PIECES,
    RoutingTotals,
    TokenPairs,
    correlation,
    mean_in_bins,
    over_layers,
)
from simbal.analysis.shared.subject import LayerRouter, Predicted, Subject, check_pass, routers_of
from simbal.analysis.shared.trained import TrainedRun, load
from simbal.config.values import whole_number
from simbal.errors import UserError

LIKE = ("num_layers", "d_model", "num_experts", "top_k")  # keys of `model` that two runs must share to be compared
DEFINITION = {
    "seu": "distinct experts chosen in a sequence / E, mean over sequences",
    "seu_<length>": "the same in whole pieces of so many tokens of the sequences",
    "unique_experts": "experts chosen at least once; summed over layers",
    "unique_experts_min": "experts chosen at least once, in the layer that has the fewest",
    "dead_experts": "experts never chosen (c = 0); summed over layers",
    "near_dead_experts": "experts with c < 0.1 mean c, dead ones among them; summed over layers",
    "max_vio": "max c / mean c - 1, with c the tokens sent to each expert",
    "gini": "sum_ij |c_i - c_j| / (2 E sum c)",
    "squared_variation": "var c / (mean c)^2, E in the variance's denominator",
    "entropy": "entropy in nats of a token's top-k weights divided by their sum, mean over tokens",
    "entropy_full": "entropy in nats of a token's probabilities over all E experts, mean over tokens",
    "entropy_load": "entropy in nats of c / sum c",
    "effective_share": "exp(entropy_load) / E: share of the experts that are in effective use",
    "mutual_information": "H(mean p) - mean H(p) in nats, p over all E experts, means over tokens",
    "similarity_correlation": "Pearson's, over pairs of tokens, of cos(x, x') with cos(xW^T, x'W^T); x a layer's input",
    "choice_overlap": "shared experts of the two top-K sets of a pair / K, mean over the pairs in a bin of cos(x, x')",
    "saturation": "shared experts of this run's and the other run's top-K sets of a token / K, mean over tokens",
    "metrics": "mean over layers where no sum over layers is said",
}
USE = {
    "seu_128": "SEU\n128", "seu_512": "SEU\n512", "seu": "SEU\n{seq_len}", "unique_experts": "experts\nused",
    "dead_experts": "\ndead", "near_dead_experts": "near-\ndead", "max_vio": "\nMaxVio", "gini": "\nGini",
    "squared_variation": "\nCV^2",
}  # fmt: skip
SURENESS = {
    "entropy": "entropy\ntop-K", "entropy_full": "entropy\nfull", "entropy_load": "entropy\nload",
    "mutual_information": "mutual\ninformation", "similarity_correlation": "similarity\ncorrelation",
    "saturation": "\nsaturation",
}  # fmt: skip


def routing(
    subject: Subject, tokens: int | None, batch_size: int, pairs: int, bins: int, seed: int, against: str | None
) -> Finding:
    """Measure the routing of every layer on the validation windows.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.
        pairs: of tokens in the random sample, at least 2.
        bins: of cos(x, x'), equal parts of [-1, 1].
        seed: of the sample.
        against: for a run, the path of another on the same data and of the same shape, or of weights that a run kept
            (trainer.keep_every); None: no saturation.

    Raises:
        UserError: a key is out of its range, the model is dense, or `against` is a run that cannot be compared.
    """
    check_pass("routing", tokens, batch_size)
    for key, value, least in (("pairs", pairs, 2), ("bins", bins, 1), ("seed", seed, 0)):
        whole_number(f"analysis.routing.{key}", value, least)
    routers = routers_of(subject, "routing")
    other = None if against is None else _other(subject, against)
    seq_len = subject.seq_len
    totals = RoutingTotals(seq_len)
    sample = TokenPairs(subject.num_batches(1, tokens) * seq_len, pairs, seed)
    with subject.inputs() as inputs:
        for batch, its in _batches(subject, other, batch_size, tokens):
            totals.add(batch.routings, its.routings if its else None)
            sample.add(inputs, batch.routings)
    record = _record(totals, sample, routers, bins) | {"ragged": subject.ragged}
    tables = routing_tables(record["layers"], record["metrics"], record["choice_overlap"], seq_len)
    return Finding(tables, routing_notes(record, totals.lengths, against), record)


def routing_tables(
    layers: Mapping[str, Sequence[Any]], metrics: Mapping[str, float], overlap: Mapping[str, Any], seq_len: int
) -> list[Table]:
    """Return two tables with a line for each layer, and one with a line for each bin that holds pairs."""
    use = {name: heading.format(seq_len=seq_len) for name, heading in USE.items()}
    return [
        _by_layer("use of experts by layer", use, layers, metrics),
        _by_layer("entropy (nats) and similarity by layer", SURENESS, layers, metrics),
        _by_bin(overlap),
    ]


def routing_notes(record: Mapping[str, Any], lengths: Mapping[str, int], against: str | None) -> list[str]:
    """Return notes on the number of tokens, on the values that chance would give, and on what was left out."""
    num_experts, top_k, seq_len = record["num_experts"], record["top_k"], record["seq_len"]
    each, most = ("any number", num_experts) if record["ragged"] else (top_k, top_k)
    by_chance = "" if record["ragged"] else f"; choices by chance overlap by {top_k / num_experts:.3f}"
    said = [
        f"{record['tokens']:,} tokens in {record['sequences']:,} sequences, {record['pairs']:,} pairs of tokens. "
        f"{num_experts} experts, {each} for each token: entropies are at most {log(most):.3f} (chosen) and "
        f"{log(num_experts):.3f} nats{by_chance}.",
        "The last line is the sum over layers of experts used, dead and near-dead (less than a tenth of the mean "
        "load), and the mean over layers of all else.",
    ]
    too_long = [str(length) for length in PIECES if f"seu_{length}" not in lengths]
    if too_long:
        said.append(f"SEU at {' and '.join(too_long)} is left out: sequences have {seq_len} tokens.")
    unused = {length: seq_len % length for length in lengths.values() if seq_len % length}
    said += [f"SEU {length} leaves out the last {rest} tokens of each sequence." for length, rest in unused.items()]
    if "similarity_correlation" not in record["metrics"]:
        said.append("A similarity correlation is undefined where all pairs have the same cosine.")
    if against is not None:
        said.append(
            f"Saturation is against {against}; the experts of runs that started from other weights share no order."
        )
    return said


def _record(totals: RoutingTotals, sample: TokenPairs, routers: Sequence[LayerRouter], bins: int) -> dict[str, Any]:
    layers = totals.layers()
    cosines_LC, logit_cosines_LC, overlaps_LC = sample.compare([router.weight_ED for router in routers])
    correlations = [correlation(x_C, y_C) for x_C, y_C in zip(cosines_LC, logit_cosines_LC, strict=True)]
    metrics = over_layers(layers)
    known = [value for value in correlations if value is not None]
    if len(known) == len(correlations):
        metrics["similarity_correlation"] = sum(known) / len(known)
    return {
        "definition": DEFINITION,
        "tokens": totals.tokens,
        "sequences": totals.sequences,
        "seq_len": totals.seq_len,
        "num_experts": len(routers[0].weight_ED),
        "top_k": routers[0].top_k,
        "pairs": cosines_LC.shape[1],
        "metrics": metrics,
        "layers": layers | {"similarity_correlation": correlations, "tokens_per_expert": totals.tokens_per_expert()},
        "choice_overlap": _in_bins(cosines_LC, overlaps_LC, bins),
    }


def _other(trained: Subject, against: str) -> TrainedRun:
    """Return the run or weights at `against`; `UserError` unless its choices compare with those of `trained`."""
    if not isinstance(trained, TrainedRun):
        raise UserError(f"analysis.routing.against={against} is for runs, and {trained.path} is none: leave it out")
    other = load(Path(against), trained.device.type, trained.places)
    mine, its = (dict[str, object]({"data.seq_len": run.spec.config.data.seq_len}) for run in (trained, other))
    for facts, run in ((mine, trained), (its, other)):
        facts |= {f"model.{key}": getattr(run.spec.config.model, key) for key in LIKE}
        facts["tokens"] = run.store.fingerprints["tokens"][:12]
    for key, value in mine.items():
        if its[key] != value:
            raise UserError(f"analysis.routing.against={against} has {key}={its[key]}, {trained.path} has {value}")
    return replace(other, validation=trained.validation)  # the same windows, whatever its own seed would draw


def _batches(
    subject: Subject, other: TrainedRun | None, batch_size: int, tokens: int | None
) -> Iterator[tuple[Predicted, Predicted | None]]:
    """Yield what both runs predict on the same windows; None for a run that is not there."""
    batches = subject.predict(batch_size, tokens)
    theirs = other.predict(batch_size, tokens) if other else iter(())
    for batch in track(batches, "routing", subject.num_batches(batch_size, tokens), transient=True):
        yield batch, next(theirs, None)


def _in_bins(cosines_LC: Tensor, overlaps_LC: Tensor, bins: int) -> dict[str, Any]:
    """Return the overlaps of choices by how alike the inputs are: of all layers together, and of each."""
    count, overlap = mean_in_bins(cosines_LC.flatten(), overlaps_LC.flatten(), bins)
    layers = [mean_in_bins(x_C, y_C, bins) for x_C, y_C in zip(cosines_LC, overlaps_LC, strict=True)]
    return {
        "from": [2 * index / bins - 1 for index in range(bins)],
        "to": [2 * (index + 1) / bins - 1 for index in range(bins)],
        "pairs": count,
        "overlap": overlap,
        "layers": [{"pairs": count, "overlap": overlap} for count, overlap in layers],
    }


def _by_layer(
    title: str, columns: Mapping[str, str], layers: Mapping[str, Sequence[Any]], metrics: Mapping[str, float]
) -> Table:
    shown = {name: heading for name, heading in columns.items() if name in layers}
    rows = ([str(index), *(_cell(layers[name][index]) for name in shown)] for index in range(len(layers["seu"])))
    total = ["all", *(_cell(metrics.get(name), counted="experts" in name) for name in shown)]
    return numbers_table(title, ("\nlayer", *shown.values()), rows, [total])


def _cell(value: float | None, counted: bool = False) -> str:
    if value is None:
        return "-"
    return str(int(value)) if counted or isinstance(value, int) else f"{value:.4f}"


def _by_bin(overlap: Mapping[str, Any]) -> Table:
    bins = zip(overlap["from"], overlap["to"], overlap["pairs"], overlap["overlap"], strict=True)
    rows = ([f"{low:+.2f} to {high:+.2f}", f"{pairs:,}", f"{mean:.4f}"] for low, high, pairs, mean in bins if pairs)
    return numbers_table("pairs of tokens, all layers", ("cosine of inputs", "pairs", "overlap of choices"), rows)

"""The analysis `routing`: how routers use their experts, how sure they are, and whether they send like tokens alike.

Reference: arXiv 2506.14038, section 4.1 and table 3 (SEU, entropy); arXiv 2408.15664 (MaxVio); router saturation as in
OLMoE, arXiv 2409.02060.
Shapes: B sequences, S sequence length, N tokens, R tokens of whole pieces, C pairs, Q tokens in pairs, q of them in a
batch, L MoE layers, E experts, K experts per token, D model width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import LayerRouter, Predicted, Subject, check_pass, routers_of
from simbal.analysis.trained import TrainedRun, load
from simbal.config.values import whole_number
from simbal.errors import UserError
from simbal.metrics import routing as metrics_of
from simbal.metrics.routing import choice_overlap, full_entropy, mutual_information, sequence_expert_use, topk_entropy
from simbal.model.init import generator
from simbal.model.router import Routing

LIKE = ("num_layers", "d_model", "num_experts", "top_k")  # keys of `model` that two runs must share to be compared
PIECES = (128, 512)  # tokens; SEU grows with the length, so it is compared at lengths that many runs have
SUMMED = ("unique_experts", "dead_experts", "near_dead_experts")  # over layers; of all else the mean
CONSTANT = 1e-12  # cosines that differ by less differ by the rounding of fp64
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
) -> Result:
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
    return Result(tables, routing_notes(record, totals.lengths, against), record)


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


class RoutingTotals:
    """Sums of the routing of each layer; once all batches have been added, `layers` gives the numbers."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.tokens, self.sequences = seq_len, 0, 0
        self.lengths = {f"seu_{length}": length for length in PIECES if length <= seq_len} | {"seu": seq_len}
        self._counts_LE, self._probs_LE = torch.tensor(0), torch.tensor(0.0)
        self._sums_L: dict[str, Tensor] = {}

    def add(self, routings: Sequence[Routing], others: Sequence[Routing] | None = None) -> None:
        """Add one batch: the routing of each layer, and that of another run on the same tokens."""
        self.sequences += routings[0].num_sequences
        self.tokens += len(routings[0].logits_NE)
        self._counts_LE = self._counts_LE + torch.stack([r.tokens_per_expert_E for r in routings]).cpu()
        probs_LE = torch.stack([routing.distribution_NE.double().sum(0) for routing in routings])
        self._probs_LE = self._probs_LE + probs_LE.cpu()
        for length_name, length in self.lengths.items():
            self._add(length_name, [_use_of_pieces(routing, self.seq_len, length) for routing in routings])
        self._add("entropy", [topk_entropy(routing.topk_probs_NK.double()).sum() for routing in routings])
        self._add("entropy_full", [full_entropy(routing.distribution_NE.double()).sum() for routing in routings])
        if others is not None:
            pairs = zip(routings, others, strict=True)
            overlaps = [_overlap(ours, theirs.topk_experts_NK).sum() for ours, theirs in pairs]
            self._add("saturation", overlaps)

    def layers(self) -> dict[str, list[float]]:
        """Return each number of each layer, as lists of length L by name."""
        counts_LE, entropy_L = self._counts_LE, self._sums_L["entropy_full"] / self.tokens
        tensors = {
            name: self._sums_L[name] / (self.sequences * (self.seq_len // length))
            for name, length in self.lengths.items()
        }
        tensors |= {
            "unique_experts": metrics_of.unique_experts(counts_LE),
            "dead_experts": metrics_of.dead_experts(counts_LE),
            "near_dead_experts": metrics_of.near_dead_experts(counts_LE),
            "max_vio": metrics_of.max_vio(counts_LE),
            "gini": metrics_of.gini(counts_LE),
            "squared_variation": metrics_of.squared_variation(counts_LE),
            "entropy": self._sums_L["entropy"] / self.tokens,
            "entropy_full": entropy_L,
            "entropy_load": metrics_of.load_entropy(counts_LE),
            "effective_share": metrics_of.load_entropy(counts_LE).exp() / counts_LE.shape[-1],
            "mutual_information": mutual_information(self._probs_LE / self.tokens, entropy_L),
        }
        if "saturation" in self._sums_L:
            tensors["saturation"] = self._sums_L["saturation"] / self.tokens
        return {name: values_L.tolist() for name, values_L in tensors.items()}

    def tokens_per_expert(self) -> list[list[int]]:
        """Return the counts (L, E) from which the load's numbers come."""
        return self._counts_LE.tolist()

    def _add(self, name: str, values: list[Tensor]) -> None:
        values_L = torch.stack(values).double().cpu()
        self._sums_L[name] = self._sums_L[name] + values_L if name in self._sums_L else values_L


class TokenPairs:
    """A sample of pairs of different tokens, drawn before the first batch.

    It depends on the seed and the number of tokens alone. For a pair's token fp32 x and its choice are kept: 4 L D + 8
    L K bytes.
    """

    def __init__(self, num_tokens: int, pairs: int, seed: int) -> None:
        if num_tokens < 2:
            raise UserError(f"pairs of tokens need 2 tokens, but the validation windows hold {num_tokens}")
        draws = generator(seed, "routing/pairs")
        first_C = torch.randint(num_tokens, (pairs,), generator=draws)
        step_C = torch.randint(1, num_tokens, (pairs,), generator=draws)
        both_2C = torch.stack([first_C, (first_C + step_C) % num_tokens])
        self._tokens_Q, self._which_2C = torch.unique(both_2C, return_inverse=True)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor]] = []  # of each batch, x (L, q, D) and choice (L, q, K)

    def add(self, inputs: Sequence[Tensor], routings: Sequence[Routing]) -> None:
        """Add one batch; batches come in order."""
        end = self._seen + len(inputs[0])
        here_q = self._tokens_Q[(self._tokens_Q >= self._seen) & (self._tokens_Q < end)] - self._seen
        here_q = here_q.to(inputs[0].device)
        x_LqD = torch.stack([x_ND[here_q].float().cpu() for x_ND in inputs])
        experts_LqK = torch.stack([routing.topk_experts_NK[here_q].cpu() for routing in routings])
        self._kept.append((x_LqD, experts_LqK))
        self._seen = end

    def compare(self, router_weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines of the inputs, cosines of the logits x W^T, and overlaps of the choices, (L, C) each, fp64."""
        x_LQD = torch.cat([x_LqD for x_LqD, _ in self._kept], 1)
        experts_LQK = torch.cat([experts_LqK for _, experts_LqK in self._kept], 1)
        first_C, second_C = self._which_2C
        inputs, logits, overlaps = [], [], []
        for x_QD, experts_QK, weight_ED in zip(x_LQD.double(), experts_LQK, router_weights, strict=True):
            logits_QE = x_QD @ weight_ED.detach().cpu().double().T
            inputs.append(F.cosine_similarity(x_QD[first_C], x_QD[second_C]))
            logits.append(F.cosine_similarity(logits_QE[first_C], logits_QE[second_C]))
            overlaps.append(choice_overlap(experts_QK[first_C], experts_QK[second_C], len(weight_ED)))
        return torch.stack(inputs), torch.stack(logits), torch.stack(overlaps)


def over_layers(layers: dict[str, list[float]]) -> dict[str, float]:
    """Return the sum of numbers of experts, the mean of all others, and the least number of experts used."""
    over = {name: sum(values) / (1 if name in SUMMED else len(values)) for name, values in layers.items()}
    return over | {"unique_experts_min": float(min(layers["unique_experts"]))}


def correlation(x_C: Tensor, y_C: Tensor) -> float | None:
    """Return Pearson's correlation, in [-1, 1]; None if one of the two is constant but for rounding."""
    x_C, y_C = x_C - x_C.mean(), y_C - y_C.mean()
    if min(x_C.abs().max(), y_C.abs().max()) < CONSTANT:
        return None
    return float((x_C @ y_C) / (x_C.square().sum() * y_C.square().sum()).sqrt())


def mean_in_bins(cosines_C: Tensor, values_C: Tensor, bins: int) -> tuple[list[int], list[float | None]]:
    """Return the number of pairs in each of `bins` equal parts of [-1, 1], and the mean of their values.

    The mean is None where there is no pair.
    """
    bin_C = ((cosines_C + 1) / 2 * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_C, minlength=bins).tolist()
    sums = torch.bincount(bin_C, values_C.double(), minlength=bins).tolist()
    return counts, [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _overlap(routing: Routing, others_NK: Tensor) -> Tensor:
    return choice_overlap(routing.topk_experts_NK, others_NK, routing.logits_NE.shape[1])


def _use_of_pieces(routing: Routing, seq_len: int, length: int) -> Tensor:
    """Return SEU summed over the whole pieces of `length` tokens; the rest of a sequence is left out."""
    pieces, num_experts = seq_len // length, routing.logits_NE.shape[-1]
    experts_BSK = routing.topk_experts_NK.view(routing.num_sequences, seq_len, -1)
    experts_BRK = experts_BSK[:, : pieces * length]
    return sequence_expert_use(experts_BRK, routing.num_sequences * pieces, num_experts).sum()


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

"""The analysis `routing`: expert usage, router entropy, and whether similar tokens choose similar experts.

Reference: arXiv 2506.14038, section 4.1 and table 3 (SEU, entropy); arXiv 2408.15664 (MaxVio); arXiv 2409.02060
(OLMoE, router saturation).
Shapes: B sequences, S sequence length, N tokens, R tokens in all pieces, C pairs, Q tokens that occur in pairs, q such
tokens in a batch, L MoE layers, E experts, K experts per token, D model width.
"""

from collections.abc import Sequence
from itertools import repeat
from math import log
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from simbal.analysis.result import Result, layer_table, numbers_table
from simbal.analysis.subject import LayerRouter, Subject, require_routers
from simbal.analysis.trained import TrainedRun
from simbal.errors import UserError
from simbal.metrics import routing as load_metrics
from simbal.metrics.routing import choice_overlap, full_entropy, mutual_information, sequence_expert_use, topk_entropy
from simbal.model.init import generator
from simbal.model.router import Routing

PIECES = (128, 512)  # tokens; SEU grows with length, so it is also measured at lengths common to many runs
SUMMED = ("unique_experts", "dead_experts", "near_dead_experts")  # over layers; all others are means over layers
LOAD_METRICS = (*SUMMED, "max_vio", "gini", "squared_variation")  # functions of `load_metrics`
CONSTANT = 1e-12  # smaller differences of cosines are rounding errors of fp64
DEFINITION = {
    "seu": "distinct experts chosen in a sequence / E, mean over sequences",
    "seu_<length>": "SEU of complete pieces of this many tokens",
    "unique_experts": "experts chosen at least once; summed over layers",
    "unique_experts_min": "experts chosen at least once, in the layer with the fewest",
    "dead_experts": "experts never chosen (c = 0); summed over layers",
    "near_dead_experts": "experts with c < 0.1 mean c, including dead ones; summed over layers",
    "max_vio": "max c / mean c - 1, where c is the number of tokens sent to each expert",
    "gini": "sum_ij |c_i - c_j| / (2 E sum c)",
    "squared_variation": "var c / (mean c)^2, with E in the denominator of the variance",
    "entropy": "entropy in nats of a token's top-k weights divided by their sum, mean over tokens",
    "entropy_full": "entropy in nats of a token's probabilities over all E experts, mean over tokens",
    "entropy_load": "entropy in nats of c / sum c",
    "effective_share": "exp(entropy_load) / E: share of experts in effective use",
    "mutual_information": "H(mean p) - mean H(p) in nats, p over all E experts, means over tokens",
    "similarity_correlation": "Pearson correlation, over pairs of tokens, of cos(x, x') and cos(xW^T, x'W^T), where x "
    "is a layer's input",
    "choice_overlap": "experts that both tokens of a pair choose / K, mean over the pairs in a bin of cos(x, x')",
    "saturation": "experts that both runs choose for a token / K, mean over tokens",
    "metrics": "mean over layers unless summed over layers",
}
USE = {
    "seu_128": ("SEU\n128", ".4f"), "seu_512": ("SEU\n512", ".4f"), "seu": ("SEU\n{seq_len}", ".4f"),
    "unique_experts": ("experts\nused", ".0f"), "dead_experts": ("\ndead", ".0f"),
    "near_dead_experts": ("near-\ndead", ".0f"), "max_vio": ("\nMaxVio", ".4f"), "gini": ("\nGini", ".4f"),
    "squared_variation": ("\nCV^2", ".4f"),
}  # fmt: skip
ENTROPIES = {
    "entropy": ("entropy\ntop-K", ".4f"), "entropy_full": ("entropy\nfull", ".4f"),
    "entropy_load": ("entropy\nload", ".4f"), "mutual_information": ("mutual\ninformation", ".4f"),
    "similarity_correlation": ("similarity\ncorrelation", ".4f"), "saturation": ("\nsaturation", ".4f"),
}  # fmt: skip


def routing(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    pairs: Annotated[int, Field(ge=2)],
    bins: PositiveInt,
    seed: NonNegativeInt,
    against: str | None,
) -> Result:
    """Measure the routing of each layer on the validation split.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.
        pairs: random pairs of tokens.
        bins: number of equal bins of [-1, 1] for cos(x, x').
        seed: seed of the pairs.
        against: path of a run with the same data and model shape, or of weights kept by trainer.keep_every, for
            saturation; None: do not measure saturation.

    Raises:
        UserError: the model is dense, or it cannot be compared with `against`.
    """
    routers = require_routers(subject, "routing")
    other = None if against is None else _load_other(subject, against)
    totals = RoutingTotals(subject.seq_len)
    sample = TokenPairs(subject.num_sequences(tokens) * subject.seq_len, pairs, seed)
    others = other.predict(batch_size, tokens) if other else repeat(None)
    with subject.inputs() as inputs:
        batches = subject.track_predictions("routing", batch_size, tokens)
        for batch, theirs in zip(batches, others, strict=False):
            totals.add(batch.routings, theirs.routings if theirs else None)
            sample.add(inputs, batch.routings)
    record = _record(totals, sample, routers, bins) | {"ragged": subject.ragged}
    use = {name: (heading.format(seq_len=subject.seq_len), spec) for name, (heading, spec) in USE.items()}
    last = {"all": {"similarity_correlation": None} | record["metrics"]}
    tables = [
        layer_table("use of experts by layer", use, record["layers"], last),
        layer_table("entropy (nats) and similarity by layer", ENTROPIES, record["layers"], last),
        _bins_table(record["choice_overlap"]),
    ]
    return Result(tables, _notes(record, totals.lengths, against), record)


class RoutingTotals:
    """Routing statistics of each layer, summed over batches."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.tokens, self.sequences = seq_len, 0, 0
        self.lengths = {f"seu_{length}": length for length in PIECES if length <= seq_len} | {"seu": seq_len}
        self._sums: dict[str, Tensor] = {}  # by name, with L rows

    def add(self, routings: Sequence[Routing], others: Sequence[Routing] | None = None) -> None:
        """Add one batch: the routing of each layer and, optionally, another run's routing of the same tokens."""
        self.sequences += routings[0].num_sequences
        self.tokens += len(routings[0].logits_NE)
        self._add("counts", [routing.tokens_per_expert_E for routing in routings])
        self._add("probs", [routing.distribution_NE.double().sum(0) for routing in routings])
        for name, length in self.lengths.items():
            self._add(name, [_sum_of_seu(routing, self.seq_len, length) for routing in routings])
        self._add("entropy", [topk_entropy(routing.topk_probs_NK.double()).sum() for routing in routings])
        self._add("entropy_full", [full_entropy(routing.distribution_NE.double()).sum() for routing in routings])
        if others is not None:
            num_experts = routings[0].logits_NE.shape[1]
            pairs = [
                (ours.topk_experts_NK, other.topk_experts_NK) for ours, other in zip(routings, others, strict=True)
            ]
            self._add("saturation", [choice_overlap(*pair, num_experts).sum() for pair in pairs])

    def _add(self, name: str, values: list[Tensor]) -> None:
        """Add one value per layer. fp64 is exact for counts below 2^53."""
        added = torch.stack(values).double().cpu()
        self._sums[name] = self._sums[name] + added if name in self._sums else added

    def layers(self) -> dict[str, list[float]]:
        """Return the values of each metric by layer."""
        counts_LE = self._sums["counts"]
        tensors = {name: self._sums[name] / (self.sequences * (self.seq_len // n)) for name, n in self.lengths.items()}
        tensors |= {name: getattr(load_metrics, name)(counts_LE) for name in LOAD_METRICS}
        for name in ("entropy", "entropy_full", "saturation"):
            if name in self._sums:
                tensors[name] = self._sums[name] / self.tokens
        tensors["entropy_load"] = load_metrics.load_entropy(counts_LE)
        tensors["effective_share"] = tensors["entropy_load"].exp() / counts_LE.shape[-1]
        tensors["mutual_information"] = mutual_information(self._sums["probs"] / self.tokens, tensors["entropy_full"])
        return {name: values_L.tolist() for name, values_L in tensors.items()}

    def tokens_per_expert(self) -> list[list[int]]:
        """Return the number of tokens sent to each expert, (L, E)."""
        return self._sums["counts"].long().tolist()


class TokenPairs:
    """A random sample of pairs of different tokens, with their inputs and choices in each layer.

    The sample depends only on the seed and the number of tokens. It takes 4 L D + 8 L K bytes per token.
    """

    def __init__(self, num_tokens: int, pairs: int, seed: int) -> None:
        if num_tokens < 2:
            raise UserError(f"pairs need at least 2 tokens, but the validation windows contain {num_tokens}")
        rng = generator(seed, "routing/pairs")
        first_C = torch.randint(num_tokens, (pairs,), generator=rng)
        step_C = torch.randint(1, num_tokens, (pairs,), generator=rng)
        both_2C = torch.stack([first_C, (first_C + step_C) % num_tokens])
        self._tokens_Q, self._pairs_2C = torch.unique(both_2C, return_inverse=True)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor]] = []  # per batch: x (L, q, D) and choices (L, q, K)

    def add(self, inputs: Sequence[Tensor], routings: Sequence[Routing]) -> None:
        """Add one batch; batches must come in order."""
        end = self._seen + len(inputs[0])
        here_q = self._tokens_Q[(self._tokens_Q >= self._seen) & (self._tokens_Q < end)] - self._seen
        here_q = here_q.to(inputs[0].device)
        x_LqD = torch.stack([x_ND[here_q].float().cpu() for x_ND in inputs])
        width = max(routing.topk_experts_NK.shape[1] for routing in routings)
        chosen = [(routing.topk_experts_NK[here_q].cpu(), routing.logits_NE.shape[1]) for routing in routings]
        padded = [F.pad(qK, (0, width - qK.shape[1]), value=num_experts) for qK, num_experts in chosen]
        experts_LqK = torch.stack(padded)
        self._kept.append((x_LqD, experts_LqK))
        self._seen = end

    def compare(self, router_weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cosines of inputs, the cosines of logits x W^T, and the overlaps of choices, (L, C) each, fp64."""
        x_LQD = torch.cat([x_LqD for x_LqD, _ in self._kept], 1)
        experts_LQK = torch.cat([experts_LqK for _, experts_LqK in self._kept], 1)
        first_C, second_C = self._pairs_2C
        inputs, logits, overlaps = [], [], []
        for x_QD, experts_QK, weight_ED in zip(x_LQD.double(), experts_LQK, router_weights, strict=True):
            logits_QE = x_QD @ weight_ED.detach().cpu().double().T
            inputs.append(F.cosine_similarity(x_QD[first_C], x_QD[second_C]))
            logits.append(F.cosine_similarity(logits_QE[first_C], logits_QE[second_C]))
            overlaps.append(choice_overlap(experts_QK[first_C], experts_QK[second_C], len(weight_ED)))
        return torch.stack(inputs), torch.stack(logits), torch.stack(overlaps)


def over_layers(layers: dict[str, list[float]]) -> dict[str, float]:
    """Reduce each metric over layers: sum the counts of experts, and average all others."""
    over = {name: sum(values) / (1 if name in SUMMED else len(values)) for name, values in layers.items()}
    return over | {"unique_experts_min": float(min(layers["unique_experts"]))}


def correlation(x_C: Tensor, y_C: Tensor) -> float | None:
    """Return Pearson's correlation, or None if one of the inputs is constant up to rounding."""
    x_C, y_C = x_C - x_C.mean(), y_C - y_C.mean()
    if min(x_C.abs().max(), y_C.abs().max()) < CONSTANT:
        return None
    return float((x_C @ y_C) / (x_C.square().sum() * y_C.square().sum()).sqrt())


def mean_in_bins(cosines_C: Tensor, values_C: Tensor, bins: int) -> tuple[list[int], list[float | None]]:
    """Return the number of pairs in each of `bins` equal parts of [-1, 1], and their mean value (None if empty)."""
    bin_C = ((cosines_C + 1) / 2 * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_C, minlength=bins).tolist()
    sums = torch.bincount(bin_C, values_C.double(), minlength=bins).tolist()
    return counts, [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _sum_of_seu(routing: Routing, seq_len: int, length: int) -> Tensor:
    """Return SEU summed over complete pieces of `length` tokens; the remainder of each sequence is dropped."""
    pieces, num_experts = seq_len // length, routing.logits_NE.shape[-1]
    experts_BSK = routing.topk_experts_NK.view(routing.num_sequences, seq_len, -1)
    experts_BRK = experts_BSK[:, : pieces * length]
    return sequence_expert_use(experts_BRK, routing.num_sequences * pieces, num_experts).sum()


def _load_other(subject: Subject, against: str) -> TrainedRun:
    """Load the run or weights at `against`; `UserError` unless its data and shape match `subject`."""
    if not isinstance(subject, TrainedRun):
        raise UserError(f"analysis.routing.against={against} needs a run, but {subject.path} is not one: remove it")
    return subject.variant(against)


def _record(totals: RoutingTotals, sample: TokenPairs, routers: Sequence[LayerRouter], bins: int) -> dict[str, Any]:
    layers = totals.layers()
    cosines_LC, logit_cosines_LC, overlaps_LC = sample.compare([router.weight_ED for router in routers])
    correlations = [correlation(x_C, y_C) for x_C, y_C in zip(cosines_LC, logit_cosines_LC, strict=True)]
    metrics = over_layers(layers)
    known = [value for value in correlations if value is not None]
    if len(known) == len(correlations):
        metrics["similarity_correlation"] = sum(known) / len(known)
    pairs, overlap = mean_in_bins(cosines_LC.flatten(), overlaps_LC.flatten(), bins)
    by_layer = [mean_in_bins(x_C, y_C, bins) for x_C, y_C in zip(cosines_LC, overlaps_LC, strict=True)]
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
        "choice_overlap": {
            "from": [2 * index / bins - 1 for index in range(bins)],
            "to": [2 * (index + 1) / bins - 1 for index in range(bins)],
            "pairs": pairs,
            "overlap": overlap,
            "layers": [{"pairs": count, "overlap": mean} for count, mean in by_layer],
        },
    }


def _bins_table(overlap: dict[str, Any]) -> Any:
    bins = zip(overlap["from"], overlap["to"], overlap["pairs"], overlap["overlap"], strict=True)
    rows = [[f"{low:+.2f} to {high:+.2f}", f"{pairs:,}", f"{mean:.4f}"] for low, high, pairs, mean in bins if pairs]
    return numbers_table("pairs of tokens, all layers", ("cosine of inputs", "pairs", "overlap of choices"), rows)


def _notes(record: dict[str, Any], lengths: dict[str, int], against: str | None) -> list[str]:
    num_experts, top_k, seq_len = record["num_experts"], record["top_k"], record["seq_len"]
    per_token = "any number" if record["ragged"] else str(top_k)
    max_entropy = log(num_experts if record["ragged"] else top_k)
    by_chance = "" if record["ragged"] else f" Random choices overlap by {top_k / num_experts:.3f}."
    notes = [
        f"{record['tokens']:,} tokens in {record['sequences']:,} sequences, {record['pairs']:,} pairs of tokens. "
        f"{num_experts} experts, {per_token} per token: the maximum entropies are {max_entropy:.3f} (top-K) and "
        f"{log(num_experts):.3f} nats (full).{by_chance}",
        "Last row: experts used, dead and near-dead (below a tenth of the mean load) are summed over layers; all other "
        "numbers are means over layers.",
    ]
    if too_long := [str(length) for length in PIECES if f"seu_{length}" not in lengths]:
        notes.append(f"No SEU at {' and '.join(too_long)}: sequences have {seq_len} tokens.")
    for length in lengths.values():
        if seq_len % length:
            notes.append(f"SEU {length} ignores the last {seq_len % length} tokens of each sequence.")
    if "similarity_correlation" not in record["metrics"]:
        notes.append("The similarity correlation is undefined if all pairs have the same cosine.")
    if against is not None:
        notes.append(
            f"Saturation against {against}. It is meaningful only if both runs started from the same initial weights."
        )
    return notes

"""The metrics of a run: name, title, meaning, unit, format and computation of each number.

A key is the name of a metric, prefixed by where it is measured: `val/max_vio` for a validation, `train/max_vio` for a
training step, `routing.max_vio` for the analysis `routing`. Metrics of the whole run have no prefix:
`tokens_per_second`.

Validations during training use a sample of `data.validation_tokens` tokens of the validation split. The final one, in
the run's record, uses the full split, that is, the first `data.validation_document_tokens` of each document.

To add a validation metric, add an entry to VALIDATION. It then appears in record.json and metrics.jsonl, also by
layer, and in tables and their definitions.

Imports no torch, because `report.py` reads this table.
Shapes: L MoE layers, E experts, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from simbal.metrics import routing

if TYPE_CHECKING:
    from torch import Tensor

ARROWS = {"lower": " ↓", "higher": " ↑", "neither": ""}
NATS = "nats"


def perplexity(nats: float, tokens: int) -> float:
    """Return exp of the mean cross-entropy per token, nats / tokens; infinity on overflow."""
    loss = nats / tokens
    return math.exp(loss) if loss < math.log(1e300) else math.inf


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return the cross-entropy in bits per UTF-8 byte of text, which is comparable between vocabularies."""
    return nats / (math.log(2) * num_bytes)


class Sums(Protocol):
    """Sums over validation windows, in float64 and int64."""

    nats: float  # cross-entropy
    tokens: int
    num_bytes: int  # UTF-8 bytes of the text
    sequences: int
    counts_LE: Tensor  # tokens per expert; a token counts for each of its experts
    seu_L: Tensor  # sum over sequences
    entropy_L: Tensor  # of the top-k weights, sum over tokens
    router_weights: list[Tensor]  # (E, D) of each layer


@dataclass(frozen=True)
class Metric:
    """A number that is measured for every run.

    `from_sums` computes it from the sums of a validation. Alternatively, `by_layer` computes one value per layer,
    (L, ...), and `over_layers`, if given, reduces these values to one number. `of_curve` computes the number
    from the MaxVio of logged training steps.
    """

    name: str
    title: str  # of its column
    definition: str
    unit: str = ""
    number: str = "{:.4g}"  # format
    better: Literal["lower", "higher", "neither"] = "neither"
    where: str = "val/"  # prefix of the key
    column: bool = False  # whether tables show it by default
    compared: bool = True  # whether tables show its difference from the baseline
    ratio: bool = False  # whether arms are compared by ratios, that is, by differences of logarithms
    margin: bool = False  # whether equivalence_margin, in nats per token, applies
    from_sums: Callable[[Sums], float] | None = None
    by_layer: Callable[[Sums], Tensor] | None = None
    over_layers: Callable[[list[Any]], float] | None = None
    of_curve: Callable[[routing.Curve], float | None] | None = None

    @property
    def key(self) -> str:
        """The key of the number in files, such as `val/ppl`."""
        return f"{self.where}{self.name}"

    @property
    def heading(self) -> str:
        """The title, with an arrow that points in the better direction."""
        return f"{self.title}{ARROWS[self.better]}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)  # `fmean` rounds differently from the records of earlier runs


def _gram_deviations(sums: Sums) -> Tensor:
    import torch

    from simbal.metrics.similarity import mean_squared_deviation

    return torch.stack([mean_squared_deviation(weight_ED) for weight_ED in sums.router_weights])


VALIDATION = (
    Metric(
        "loss", "validation loss",
        "cross-entropy in nats, mean over the tokens of the validation split; no auxiliary loss, no z-loss",
        NATS, "{:.4f}", "lower", margin=True, from_sums=lambda sums: sums.nats / sums.tokens,
    ),
    Metric(
        "ppl", "perplexity", "exp of val/loss",
        "", "{:.3f}", "lower", column=True, ratio=True, margin=True,
        from_sums=lambda sums: perplexity(sums.nats, sums.tokens),
    ),
    Metric(
        "bpb", "bits/byte", "cross-entropy in bits, summed over tokens, divided by the UTF-8 bytes of the text",
        "bits per byte", "{:.4f}", "lower", column=True,
        from_sums=lambda sums: bits_per_byte(sums.nats, sums.num_bytes),
    ),
    Metric(
        "max_vio", "MaxVio", "max / mean - 1 of the tokens per expert on the validation split, mean over layers",
        "", "{:.3f}", "lower", column=True, by_layer=lambda sums: routing.max_vio(sums.counts_LE), over_layers=_mean,
    ),
    Metric(
        "tokens_per_expert", "load",
        "tokens of the validation split that chose each expert, by layer; a token counts for each of its experts",
        "tokens", by_layer=lambda sums: sums.counts_LE,
    ),
    Metric(
        "experts_per_token", "experts/token",
        "experts that compute a token of the validation split, mean over tokens and layers",
        "experts", "{:.3f}", by_layer=lambda sums: sums.counts_LE.sum(1) / sums.tokens, over_layers=_mean,
    ),
    Metric(
        "unique_experts", "experts used",
        "experts chosen at least once on the validation split, summed over layers",
        "experts", "{:.1f}", "higher", column=True, by_layer=lambda sums: routing.unique_experts(sums.counts_LE),
        over_layers=sum,
    ),
    Metric(
        "seu", "SEU", "distinct experts chosen in a sequence / E, mean over sequences and layers",
        "", "{:.3f}", column=True, by_layer=lambda sums: sums.seu_L / sums.sequences, over_layers=_mean,
    ),
    Metric(
        "entropy", "entropy",
        "entropy in nats of a token's top-k weights divided by their sum, mean over tokens and layers",
        NATS, "{:.3f}", column=True, by_layer=lambda sums: sums.entropy_L / sums.tokens, over_layers=_mean,
    ),
    Metric(
        "gram_deviation", "(R^T R - I)^2",
        "mean over all E^2 entries of (R^T R - I)^2 with a bf16 product, mean over layers",
        "", "{:.2e}", column=True, compared=False, by_layer=_gram_deviations, over_layers=_mean,
    ),
)  # fmt: skip
SIMILARITY = (  # from the PES of each layer, which trainer.pes_every measures
    Metric(
        "pes", "PES",
        "mean cosine over pairs of experts of their outputs on a token, mean over trainer.pes_tokens tokens "
        "sampled from the validation split, by layer",
    ),
    Metric(
        "min_pes", "min PES",
        "smallest PES of the layers: mean cosine over pairs of experts of their outputs on a token, mean over "
        "trainer.pes_tokens tokens sampled from the validation split",
        "", "{:.4f}", "lower", column=True, over_layers=min,
    ),
    Metric("mean_pes", "mean PES", "mean PES over layers", "", "{:.4f}", "lower", over_layers=_mean),
)  # fmt: skip
SETTLING = (  # from train/max_vio over the whole run
    Metric(
        "max_vio_tail", "MaxVio tail",
        "95th percentile of train/max_vio over the logged steps of the second half of the run",
        "", "{:.3f}", "lower", where="train/", of_curve=routing.tail,
    ),
    Metric(
        "steps_to_settle", "steps to settle",
        "first logged step after which the median of five logged train/max_vio stays within 1.25 times the median of "
        "the second half of the run",
        "steps", "{:,.0f}", "lower", where="train/", of_curve=routing.steps_to_settle,
    ),
)  # fmt: skip
SPEED = Metric(
    "tokens_per_second", "tokens/s", "training tokens divided by the seconds of training steps, without validation",
    "tokens per second", "{:,.0f}", "higher", where="", column=True, compared=False,
)  # fmt: skip
TRAINING = (  # of a training step, only in metrics.jsonl
    Metric("loss", "loss", "sum of train/ce, the z-loss of the head and all train/aux/..., mean over the step", NATS,
           where="train/"),
    Metric("ce", "cross-entropy", "cross-entropy in nats, mean over the tokens of the step", NATS, where="train/"),
    Metric("aux/<strategy>", "auxiliary loss", "the strategy's term of train/loss", where="train/"),
    Metric("grad_norm", "gradient norm", "Euclidean norm of the gradient before clipping", where="train/"),
    Metric("clipped", "clipped to", "factor that scales the gradient to a norm of at most optim.grad_clip; "
           "1 without clipping", where="train/"),
    Metric("aux_grad_norm", "gradient norm of auxiliary losses",
           "Euclidean norm of the gradient of all train/aux/... with respect to the routers' weights, before "
           "clipping, with constant inputs of the routers", where="train/"),
    Metric("max_vio", "MaxVio", "max / mean - 1 of the tokens per expert in the step, mean over layers",
           where="train/"),
    Metric("skipped_steps", "skipped steps", "steps skipped so far because of a non-finite loss or gradient",
           "steps", where="train/"),
    Metric("lr", "learning rate", "learning rate after the step", where=""),
)  # fmt: skip
_MEASURED = (*VALIDATION, *SIMILARITY)
NUMBERS = (*(metric for metric in _MEASURED if metric.from_sums or metric.over_layers), *SETTLING, SPEED)  # of a run


def definitions(metrics: Sequence[Metric]) -> dict[str, str]:
    """Return the definition of each metric by its key."""
    return {metric.key: metric.definition for metric in metrics}


def short_name(key: str) -> str:
    """Return the last part of a key, which users may type for short: `min_pes` for `val/min_pes`."""
    return key.replace(".", "/").rpartition("/")[2]

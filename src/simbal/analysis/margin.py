"""The analysis `margin`: how near each token's choice was, and how often rounding to bf16 would have changed it.

The margin and what is said of bf16 are ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token, Q quantiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import LayerRouter, Subject, UnsuitedError, check_pass, fixed_choices_of
from simbal.errors import UserError
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Candidates, Steering, SteeringWrapper, apply_gating, topk_indices

BF16_STEP = 2.0**-8  # bf16 numbers are this to twice this apart, relative to their size
DEFINITION = {
    "margin": "g = K-th largest less (K+1)-th largest of the scores that choose a token's experts: its logits, or what "
    "the model's strategy or rule makes of them (biased scores, say), recorded in a plain pass",
    "margin_q<quantile>": "quantile of g over tokens, linear between two of them; of all layers together",
    "near": "share of tokens with g < 2^-8 |s|, s the K-th largest score: bf16 numbers are 2^-8 to 2^-7 of their size "
    "apart; of all layers together",
    "flips": "share of tokens whose set of experts is another one if the logits, as they go into the gating, are "
    "rounded to bf16 and all else stays in its precision; 0 where the model itself computes them in bf16",
}


@dataclass
class Watching(SteeringWrapper):
    """A `Steering` by the model's own `strategy` that changes nothing, and keeps what it sees of every choice."""

    strategy: Steering
    routers: Sequence[LayerRouter]
    margins: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, (N,) of each batch
    near: dict[int, int] = field(default_factory=dict)  # tokens, by layer
    flips: dict[int, int] = field(default_factory=dict)
    by_logits: bool = True  # whether the logits themselves were the scores, everywhere

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores, (N, E)."""
        layer, router = candidates.layer, self.routers[candidates.layer]
        scores_NE = self.strategy.choice_scores(candidates)
        rounded_NE = candidates.logits_NE.bfloat16().to(candidates.logits_NE.dtype)
        rounded = replace(candidates, logits_NE=rounded_NE, probs_NE=apply_gating(rounded_NE, router.gating))
        margin_N, kth_N = margins(scores_NE, router.top_k)
        flipped_N = flips(scores_NE, self.strategy.choice_scores(rounded), router.top_k)
        self.by_logits &= scores_NE is candidates.logits_NE
        self.margins.setdefault(layer, []).append(margin_N.cpu())
        self.near[layer] = self.near.get(layer, 0) + int((margin_N < BF16_STEP * kth_N.abs()).sum())
        self.flips[layer] = self.flips.get(layer, 0) + int(flipped_N.sum())
        return scores_NE


def margins(scores_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the K-th largest score less the (K+1)-th of each token, and the K-th, (N,) each, in fp64."""
    kth_N2 = scores_NE.double().sort(dim=-1, descending=True).values[:, top_k - 1 : top_k + 1]
    return kth_N2[:, 0] - kth_N2[:, 1], kth_N2[:, 0]


def flips(scores_NE: Tensor, others_NE: Tensor, top_k: int) -> Tensor:
    """Return whether the K largest scores are those of other experts than the K largest others, (N,) bool."""
    chosen_NE, other_NE = (chosen_experts(topk_indices(each, top_k), each.shape[1]) for each in (scores_NE, others_NE))
    return (chosen_NE != other_NE).any(1)


def margin(subject: Subject, tokens: int | None, batch_size: int, quantiles: list[float]) -> Result:
    """Measure the margin of every choice, and the choices that rounding to bf16 changes.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.
        quantiles: of the margin, from 0 to 1.

    Raises:
        UserError: the model is dense or gives a token any number of experts, leaves nothing to choose or has a rule
            that cannot be watched, or a key is out of its range.
    """
    check_pass("margin", tokens, batch_size)
    if not (quantiles and all(0 <= level <= 1 for level in quantiles)):
        raise UserError(f"analysis.margin.quantiles={quantiles} must be a list of numbers from 0 to 1")
    routers = fixed_choices_of(subject, "margin")
    if subject.choosable == subject.top_k:
        raise UnsuitedError(
            f"analysis=margin is of choices, and each token of {subject.path} takes all experts there are"
        )
    seen = Watching(subject.steering, routers)
    passes = subject.predict(batch_size, tokens, seen)
    for _ in track(passes, "margin", subject.num_batches(batch_size, tokens), transient=True):
        pass
    margins_LN = torch.stack([torch.cat(seen.margins[layer]) for layer in range(len(routers))])
    levels, counted = sorted({*quantiles}), margins_LN.shape[1]
    layers = _quantiles(margins_LN, levels)
    layers |= {
        name: [tokens_of[layer] / counted for layer in range(len(routers))]
        for name, tokens_of in (("near", seen.near), ("flips", seen.flips))
    }
    metrics = {name: values[0] for name, values in _quantiles(margins_LN.view(1, -1), levels).items()}
    metrics |= {name: sum(layers[name]) / len(routers) for name in ("near", "flips")}
    record = {
        "definition": DEFINITION, "tokens": counted, "by_logits": seen.by_logits, "metrics": metrics, "layers": layers,
    }  # fmt: skip
    return Result([_table(record, levels)], [_note(record)], record)


def _quantiles(margins_LN: Tensor, levels: Sequence[float]) -> dict[str, list[float]]:
    """Return each quantile of each row; torch's own stops at 16 million numbers."""
    values_QL = np.quantile(margins_LN.numpy(), levels, axis=1)
    return {_name(level): values_L.tolist() for level, values_L in zip(levels, values_QL, strict=True)}


def _name(level: float) -> str:
    return f"margin_q{level:g}"


def _table(record: dict[str, Any], levels: Sequence[float]) -> Table:
    layers, metrics = record["layers"], record["metrics"]
    names, above = [*map(_name, levels)], ["margin", *[""] * (len(levels) - 1)]
    headings = ("\nlayer", *(f"{word}\n{level:g}" for word, level in zip(above, levels, strict=True)))
    rows = [
        [str(index), *(f"{layers[name][index]:.3g}" for name in names), *_shares(layers["near"][index], flipped)]
        for index, flipped in enumerate(layers["flips"])
    ]
    last = ["all", *(f"{metrics[name]:.3g}" for name in names), *_shares(metrics["near"], metrics["flips"])]
    return numbers_table("margin of the choice by layer", (*headings, "near\n(bf16)", "flips\n(bf16)"), rows, [last])


def _shares(near: float, flipped: float) -> tuple[str, str]:
    return f"{near:.4f}", f"{flipped:.4f}"


def _note(record: dict[str, Any]) -> str:
    scores = "the logits" if record["by_logits"] else "those of the model's strategy or rule, not its logits"
    return (
        f"{record['tokens']:,} tokens. The scores that choose are {scores}. margin: its quantiles over tokens; near: "
        "it is below 2^-8 of the K-th score; flips: rounding the logits to bf16 changes the set."
    )

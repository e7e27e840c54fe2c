"""The analysis `margin`: how close each token's choice was, and how often rounding to bf16 would have changed it.

The metrics are ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token, Q quantiles.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from simbal.analysis.result import Result, layer_table
from simbal.analysis.subject import LayerRouter, Subject, require_choice
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Candidates, Steering, SteeringWrapper, apply_gating, topk_indices

BF16_STEP = 2.0**-8  # smallest relative gap between neighboring bf16 numbers; the largest is 2^-7
DEFINITION = {
    "margin": "g = K-th largest minus (K+1)-th largest of the scores that choose a token's experts: the logits, or the "
    "scores of the model's strategy or rule, such as biased scores",
    "margin_q<quantile>": "quantile of g over tokens, with linear interpolation; pooled over all layers",
    "near": "share of tokens with g < 2^-8 |s|, where s is the K-th largest score: neighboring bf16 numbers differ by "
    "2^-8 to 2^-7 of their size; pooled over all layers",
    "flips": "share of tokens whose set of experts changes if the logits are rounded to bf16 before the gating and "
    "everything else keeps its precision; 0 if the model itself computes the logits in bf16",
}


class MarginRecorder(SteeringWrapper):
    """A `Steering` that follows `strategy`, and records the margin and the bf16 flips of every choice."""

    def __init__(self, strategy: Steering, routers: Sequence[LayerRouter]) -> None:
        self.strategy, self.routers = strategy, routers
        self.margins: list[list[Tensor]] = [[] for _ in routers]  # by layer, one (N,) per batch
        self.near, self.flips = [0] * len(routers), [0] * len(routers)  # number of tokens by layer
        self.by_logits = True  # whether the logits were the scores of all choices

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores, (N, E)."""
        layer, router = candidates.layer, self.routers[candidates.layer]
        scores_NE = self.strategy.choice_scores(candidates)
        rounded_NE = candidates.logits_NE.bfloat16().to(candidates.logits_NE.dtype)
        rounded = replace(candidates, logits_NE=rounded_NE, probs_NE=apply_gating(rounded_NE, router.gating))
        margin_N, kth_N = margins(scores_NE, router.top_k)
        self.margins[layer].append(margin_N.cpu())
        self.near[layer] += int((margin_N < BF16_STEP * kth_N.abs()).sum())
        self.flips[layer] += int(differ(scores_NE, self.strategy.choice_scores(rounded), router.top_k).sum())
        self.by_logits &= scores_NE is candidates.logits_NE
        return scores_NE


def margins(scores_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return each token's K-th largest score minus the (K+1)-th, and the K-th, (N,) each, fp64."""
    kth_N2 = scores_NE.double().sort(dim=-1, descending=True).values[:, top_k - 1 : top_k + 1]
    return kth_N2[:, 0] - kth_N2[:, 1], kth_N2[:, 0]


def differ(scores_NE: Tensor, others_NE: Tensor, top_k: int) -> Tensor:
    """Return whether the K largest scores of each token belong to different experts in the two inputs, (N,) bool."""
    chosen_NE, other_NE = (chosen_experts(topk_indices(each, top_k), each.shape[1]) for each in (scores_NE, others_NE))
    return (chosen_NE != other_NE).any(1)


def margin(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    quantiles: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)],
) -> Result:
    """Measure the margin of every choice, and how many choices change when the logits are rounded to bf16.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.
        quantiles: quantiles of the margin.

    Raises:
        UserError: the model is dense, the number of experts varies by token, every token gets all experts, or the
            model's rule for choosing experts cannot be recorded.
    """
    routers = require_choice(subject, "margin")
    recorder = MarginRecorder(subject.steering, routers)
    for _ in subject.track_predictions("margin", batch_size, tokens, recorder):
        pass
    margins_LN = torch.stack([torch.cat(of_batches) for of_batches in recorder.margins])
    levels, counted = sorted({*quantiles}), margins_LN.shape[1]
    names = [f"margin_q{level:g}" for level in levels]
    # torch.quantile is limited to 16 million numbers
    layers = dict(zip(names, np.quantile(margins_LN, levels, axis=1).tolist(), strict=True))
    metrics = dict(zip(names, np.quantile(margins_LN, levels).tolist(), strict=True))
    for name, counts in (("near", recorder.near), ("flips", recorder.flips)):
        layers[name] = [count / counted for count in counts]
        metrics[name] = fmean(layers[name])
    record = {
        "definition": DEFINITION,
        "tokens": counted,
        "by_logits": recorder.by_logits,
        "metrics": metrics,
        "layers": layers,
    }
    columns = {name: (f"\n{level:g}", ".3g") for name, level in zip(names, levels, strict=True)}
    columns[names[0]] = (f"margin\n{levels[0]:g}", ".3g")
    columns |= {"near": ("near\n(bf16)", ".4f"), "flips": ("flips\n(bf16)", ".4f")}
    scores = "the logits" if recorder.by_logits else "scores of the model's strategy or rule, not its logits"
    note = (
        f"{counted:,} tokens; experts are chosen by {scores}. margin: quantiles over tokens; near: margin below 2^-8 "
        "of the K-th score; flips: rounding the logits to bf16 changes the set of experts."
    )
    return Result([layer_table("margin of the choice by layer", columns, layers, {"all": metrics})], [note], record)

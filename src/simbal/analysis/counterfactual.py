"""The analysis `counterfactual`: what a router knows, by the loss when tokens get other experts than it chose.

Reference: the idea of comparing routes of equal compute is that of arXiv 2605.07260; that sets are drawn for all
tokens of one layer at once, and the standard error, are ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token, G documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.quality import bootstrap, too_few
from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, UnsuitedError, check_pass, fixed_choices_of
from simbal.balancing.controls import UniformRouting
from simbal.config.values import whole_number
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Candidates, Steering, SteeringWrapper, topk_indices

DEFINITION = {
    "counterfactual": "in one layer at a time each token gets K other experts in place of those that it was routed to: "
    "a set drawn uniformly from all sets of K of the E experts but its own, weighed by the model's own gating rule on "
    "the drawn experts (divided by their sum if the model does so). All tokens at once, so that a token also feels "
    "what its predecessors got",
    "loss": "cross-entropy in nats with the routed sets, mean over tokens; no auxiliary loss, no z-loss",
    "random_loss": "the same with the drawn sets, mean over draws and layers",
    "gain": "random_loss less loss: what routing is worth in a layer, mean over layers; 0 for a router that knows "
    "nothing",
    "regret": "loss of the routed set less the smallest of it and of the drawn sets, mean over tokens and layers. The "
    "best of many is biased: it grows with the draws, also where the router could know no better",
    "<number>_se": "its standard error: standard deviation over bootstrap resamples of whole documents, whose tokens "
    "have draws of their own",
}


@dataclass(frozen=True)
class OtherSets(SteeringWrapper):
    """A `Steering` by the model's own `strategy`; in `layer` alone each token gets K other experts, drawn at random.

    A draw depends on the seed, its number, the layer and the sequence so far, and not on batches.
    """

    strategy: Steering
    layer: int
    top_k: int
    seed: int
    draw: int

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores, (N, E), or uniform numbers whose K largest are another set than by them."""
        routed_NE = self.strategy.choice_scores(candidates)
        if candidates.layer != self.layer:
            return routed_NE
        drawn_NE = self._drawn(candidates, 0)
        for attempt in count(1):  # a set drawn anew wherever it is the routed one: uniform over all others
            same_N = (self._sets(drawn_NE) == self._sets(routed_NE)).all(1)
            if not same_N.any():
                break
            drawn_NE = torch.where(same_N[:, None], self._drawn(candidates, attempt), drawn_NE)
        return drawn_NE

    def _drawn(self, candidates: Candidates, attempt: int) -> Tensor:
        blind = UniformRouting(self.seed)
        blind.step.fill_(self.draw + (attempt << 32))
        return blind.choice_scores(candidates)

    def _sets(self, scores_NE: Tensor) -> Tensor:
        return chosen_experts(topk_indices(scores_NE, self.top_k), scores_NE.shape[1])


@dataclass(frozen=True)
class Compared:
    """The losses of a layer's routed sets and of the sets drawn in their place."""

    random_loss: float
    gain: float
    regret: float
    gain_G: Tensor  # nats, summed over the tokens of each document


def counterfactual(
    subject: Subject, tokens: int | None, batch_size: int, draws: int, resamples: int, seed: int
) -> Result:
    """Measure for each layer what the loss gains by the experts being those of the router.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.
        draws: random sets of each token and layer.
        resamples: of the bootstrap, at least 2.
        seed: of the draws and of the bootstrap.

    Raises:
        UserError: the model is dense or gives a token any number of experts, leaves nothing to choose or cannot weigh
            experts that it did not choose, or a key is out of its range.
    """
    check_pass("counterfactual", tokens, batch_size)
    for key, value, least in (("draws", draws, 1), ("resamples", resamples, 2), ("seed", seed, 0)):
        whole_number(f"analysis.counterfactual.{key}", value, least)
    num_layers, strategy = len(fixed_choices_of(subject, "counterfactual")), subject.steering
    if subject.num_experts == subject.top_k:
        raise UnsuitedError(f"analysis=counterfactual gives tokens other experts, and {subject.path} always uses all")
    documents_N, routed_N = token_losses(subject, tokens, batch_size, strategy, "as routed")
    layers = []
    for layer in range(num_layers):
        steerings = [OtherSets(strategy, layer, subject.top_k, seed, draw) for draw in range(draws)]
        passes = (
            token_losses(subject, tokens, batch_size, steering, f"layer {layer}, draw {steering.draw}")[1]
            for steering in steerings
        )
        layers.append(compared(routed_N, passes, documents_N))
    record = _record(layers, routed_N, documents_N, resamples, seed)
    return Result([_table(record)], _notes(record, draws), record)


def token_losses(
    subject: Subject, tokens: int | None, batch_size: int, steering: Steering, title: str
) -> tuple[Tensor, Tensor]:
    """Return the document of each target of the validation windows, (N,), and its -log p in nats, (N,) fp64."""
    documents, losses = [], []
    batches = subject.predict(batch_size, tokens, steering)
    for batch in track(batches, title, subject.num_batches(batch_size, tokens), transient=True):
        documents.append(batch.documents_BS.flatten().cpu())
        losses.append(batch.nll_BS.flatten().double().cpu())
    return torch.cat(documents), torch.cat(losses)


def compared(routed_N: Tensor, drawn: Iterable[Tensor], documents_N: Tensor) -> Compared:
    """Return what the losses of drawn sets, (N,) for each draw, say of the routed ones."""
    total_N, best_N, draws = torch.zeros_like(routed_N), routed_N, 0
    for nll_N in drawn:
        total_N, best_N, draws = total_N + nll_N, best_N.minimum(nll_N), draws + 1
    gain_N = total_N / draws - routed_N
    gain_G = gain_N.new_zeros(int(documents_N.max()) + 1).index_add_(0, documents_N, gain_N)
    random_loss, regret = total_N.mean() / draws, (routed_N - best_N).mean()
    return Compared(random_loss.item(), gain_N.mean().item(), regret.item(), gain_G)


def standard_error(gain_G: Tensor, documents_N: Tensor, resamples: int, seed: int) -> float:
    """Return the standard error of the mean gain of a token, over resamples of the documents that have any."""
    tokens_G = torch.bincount(documents_N, minlength=len(gain_G)).double()
    no_bytes_G = torch.ones_like(tokens_G)  # bits per byte are not asked for
    sums_G3 = torch.stack([gain_G, tokens_G, no_bytes_G], 1)
    return bootstrap(sums_G3[tokens_G > 0], resamples, seed)["loss"]


def _record(
    layers: Sequence[Compared], routed_N: Tensor, documents_N: Tensor, resamples: int, seed: int
) -> dict[str, Any]:
    mean_gain_G = torch.stack([layer.gain_G for layer in layers]).mean(0)
    by_layer = {
        "random_loss": [layer.random_loss for layer in layers],
        "gain": [layer.gain for layer in layers],
        "gain_se": [standard_error(layer.gain_G, documents_N, resamples, seed) for layer in layers],
        "regret": [layer.regret for layer in layers],
    }
    metrics = {"loss": routed_N.mean().item()} | {name: fmean(values) for name, values in by_layer.items()}
    metrics["gain_se"] = standard_error(mean_gain_G, documents_N, resamples, seed)  # layers share their documents
    return {
        "definition": DEFINITION,
        "tokens": len(routed_N),
        "documents": int((torch.bincount(documents_N) > 0).sum()),
        "metrics": metrics,
        "layers": by_layer,
    }


def _table(record: dict[str, Any]) -> Table:
    layers, metrics = record["layers"], record["metrics"]
    names = ("random_loss", "gain", "gain_se", "regret")
    rows = [[str(index), *(f"{layers[name][index]:.5f}" for name in names)] for index in range(len(layers["gain"]))]
    last = ["mean", *(f"{metrics[name]:.5f}" for name in names)]
    headings = ("layer", "random loss", "gain", "standard error", "regret")
    return numbers_table("each token with other experts in one layer", headings, rows, [last])


def _notes(record: dict[str, Any], draws: int) -> list[str]:
    metrics = record["metrics"]
    return [
        f"{record['tokens']:,} tokens of {record['documents']:,} documents, loss {metrics['loss']:.5f} as routed. "
        f"gain: random loss less that, {draws} random sets for each token and layer.",
        "regret is against the best set of each token, its own among them: it grows with their number by chance "
        f"alone, and a random set's is {metrics['regret'] + metrics['gain']:.5f}.",
        *too_few(record["documents"]),
    ]

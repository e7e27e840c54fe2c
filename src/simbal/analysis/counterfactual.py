"""The analysis `counterfactual`: how much the loss rises if tokens get random experts instead of the chosen ones.

Reference: arXiv 2605.07260 compares routes of equal compute. Sampling all tokens of one layer at once, and the standard
error, are ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token, D draws, G documents.
"""

from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from simbal.analysis.quality import few_documents_note, resampled_sums
from simbal.analysis.result import Result, layer_table
from simbal.analysis.subject import NotApplicableError, Subject, require_fixed_top_k
from simbal.balancing.controls import UniformRouting
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Candidates, Steering, SteeringWrapper, topk_indices

DEFINITION = {
    "counterfactual": "in one layer at a time, each token gets K random experts instead of the chosen ones: a "
    "uniformly sampled set of K of the E experts, except the chosen set, with the model's gate weights for the sampled "
    "experts (divided by their sum if the model does so). All tokens change at once, so the changes of earlier tokens "
    "also affect later ones",
    "loss": "cross-entropy in nats with the chosen sets, mean over tokens; no auxiliary loss, no z-loss",
    "random_loss": "the same with random sets, mean over draws and layers",
    "gain": "random_loss minus loss: the value of the routing in a layer, mean over layers; 0 for a router that has "
    "learned nothing",
    "regret": "loss with the chosen set minus the smallest loss of the chosen and the random sets, mean over tokens "
    "and layers. The minimum is biased: it falls with the number of draws even for the best possible router",
    "<number>_se": "standard error: standard deviation over bootstrap resamples of whole documents, with fixed random "
    "sets",
}
COLUMNS = {
    "random_loss": ("random loss", ".5f"), "gain": ("gain", ".5f"), "gain_se": ("standard error", ".5f"),
    "regret": ("regret", ".5f"),
}  # fmt: skip


@dataclass(frozen=True)
class RandomSets(SteeringWrapper):
    """A `Steering` that gives each token K random experts in `layer`, and follows `strategy` in all other layers.

    The experts depend on the seed, the draw, the layer and the preceding tokens, but not on the batch.
    """

    strategy: Steering
    layer: int
    top_k: int
    seed: int
    draw: int

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores (N, E), or random scores in `layer` whose K largest are a different set."""
        strategy_NE = self.strategy.choice_scores(candidates)
        if candidates.layer != self.layer:
            return strategy_NE
        random_NE = self._random_scores(candidates, 0)
        for attempt in count(1):  # resampling the chosen set keeps all other sets equally likely
            same_N = (self._chosen(random_NE) == self._chosen(strategy_NE)).all(1)
            if not same_N.any():
                break
            random_NE = torch.where(same_N[:, None], self._random_scores(candidates, attempt), random_NE)
        return random_NE

    def _random_scores(self, candidates: Candidates, attempt: int) -> Tensor:
        uniform = UniformRouting(self.seed)
        uniform.step.fill_(self.draw + (attempt << 32))
        return uniform.choice_scores(candidates)

    def _chosen(self, scores_NE: Tensor) -> Tensor:
        return chosen_experts(topk_indices(scores_NE, self.top_k), scores_NE.shape[1])


def counterfactual(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    draws: PositiveInt,
    resamples: Annotated[int, Field(ge=2)],
    seed: NonNegativeInt,
) -> Result:
    """Measure how much the loss rises with random experts, in each layer.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.
        draws: random sets per token and layer.
        resamples: bootstrap resamples.
        seed: seed of the random sets and of the bootstrap.

    Raises:
        UserError: the model is dense, the number of experts varies by token, every token gets all experts, or the
            model cannot weight experts that it did not choose.
    """
    num_layers, strategy = len(require_fixed_top_k(subject, "counterfactual")), subject.steering
    if subject.num_experts == subject.top_k:
        raise NotApplicableError(
            f"analysis=counterfactual needs a choice of experts, but each token of {subject.path} gets all experts"
        )

    def losses(steering: Steering, title: str) -> tuple[Tensor, Tensor]:
        """Return the document of each target, (N,), and its -log p in nats, (N,) fp64."""
        documents, nlls = [], []
        for batch in subject.track_predictions(title, batch_size, tokens, steering):
            documents.append(batch.documents_BS.flatten().cpu())
            nlls.append(batch.nll_BS.flatten().double().cpu())
        return torch.cat(documents), torch.cat(nlls)

    documents_N, chosen_N = losses(strategy, "chosen experts")
    layers: dict[str, list[float]] = {name: [] for name in COLUMNS}
    gains = []
    for layer in range(num_layers):
        steerings = [RandomSets(strategy, layer, subject.top_k, seed, draw) for draw in range(draws)]
        random_DN = torch.stack([losses(each, f"layer {layer}, draw {each.draw}")[1] for each in steerings])
        numbers, gain_G = compare(chosen_N, random_DN, documents_N)
        numbers["gain_se"] = standard_error(gain_G, documents_N, resamples, seed)
        gains.append(gain_G)
        for name, value in numbers.items():
            layers[name].append(value)
    metrics = {"loss": chosen_N.mean().item()} | {name: fmean(values) for name, values in layers.items()}
    # layers share their documents
    metrics["gain_se"] = standard_error(torch.stack(gains).mean(0), documents_N, resamples, seed)
    num_documents = int((torch.bincount(documents_N) > 0).sum())
    record = {
        "definition": DEFINITION,
        "tokens": len(chosen_N),
        "documents": num_documents,
        "metrics": metrics,
        "layers": layers,
    }
    notes = [
        f"{len(chosen_N):,} tokens of {num_documents:,} documents, loss {metrics['loss']:.5f} with the chosen experts. "
        f"gain: random loss minus this loss, with {draws} random sets per token and layer.",
        "regret: relative to the best of each token's chosen and random sets. It grows by chance with the number of "
        f"sets; the regret of a random set is {metrics['regret'] + metrics['gain']:.5f}.",
        *few_documents_note(num_documents),
    ]
    table = layer_table("random experts in one layer at a time", COLUMNS, layers, {"mean": metrics})
    return Result([table], notes, record)


def compare(chosen_N: Tensor, random_DN: Tensor, documents_N: Tensor) -> tuple[dict[str, float], Tensor]:
    """Compare the losses of the chosen sets with the losses of D draws of random sets, in nats.

    Return random_loss, gain and regret, and the gain summed over the tokens of each document, (G,).
    """
    gain_N, regret_N = random_DN.mean(0) - chosen_N, (chosen_N - random_DN.amin(0)).clamp(min=0)
    gain_G = gain_N.new_zeros(int(documents_N.max()) + 1).index_add_(0, documents_N, gain_N)
    numbers = {"random_loss": random_DN.mean(), "gain": gain_N.mean(), "regret": regret_N.mean()}
    return {name: value.item() for name, value in numbers.items()}, gain_G


def standard_error(gain_G: Tensor, documents_N: Tensor, resamples: int, seed: int) -> float:
    """Return the standard error of the mean gain per token, over resamples of the documents that have tokens."""
    tokens_G = torch.bincount(documents_N, minlength=len(gain_G)).double()
    sums_G2 = torch.stack([gain_G, tokens_G], 1)[tokens_G > 0]
    gain_R, tokens_R = resampled_sums(sums_G2, resamples, seed).unbind(1)
    return (gain_R / tokens_R).std().item()

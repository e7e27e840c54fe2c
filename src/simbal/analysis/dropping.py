"""The analysis `dropping`: what a run loses when every token's favourite experts are masked, and others stand in.

Reference: arXiv 2506.14038, section 4.3 and figure 4; protocol of DeepSeekMoE (arXiv 2401.06066).
Shapes: N tokens, E experts, K experts per token, G documents.
"""

import math
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from simbal.analysis.quality import document_sums
from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, UnsuitedError, check_pass
from simbal.errors import UserError
from simbal.metrics.definitions import perplexity
from simbal.model.router import Candidates, Steering, SteeringWrapper, topk_indices

DEFINITION = {
    "dropping": "for each token, in all layers at once, the d experts which the run would choose first are masked, and "
    "the K largest scores of the rest choose; where a token may have any number of experts, none stands in for them; "
    "the weights follow the router's own rule for those chosen",
    "loss": "cross-entropy in nats, mean over tokens; no auxiliary loss, no z-loss",
    "ppl_drop_<d>": "exp of the loss with d experts masked; d = 0 is the run as it is",
}


@dataclass(frozen=True)
class Dropping(SteeringWrapper):
    """A `Steering` by the run's own `strategy` that masks each token's `drop` best experts."""

    strategy: Steering
    drop: int

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores (N, E), with -inf for the `drop` largest.

        A bias on the choice counts in which experts are the best.
        """
        scores_NE = self.strategy.choice_scores(candidates)
        if not self.drop:
            return scores_NE
        return scores_NE.scatter(1, topk_indices(scores_NE, self.drop), -math.inf)


def dropping(subject: Subject, tokens: int | None, batch_size: int, drops: list[int] | None) -> Result:
    """Measure loss and perplexity against the number of experts dropped.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.
        drops: numbers of experts to drop, at most E - K; None: 0 to E - K.

    Raises:
        UserError: the model is dense, too few experts would be left, or a key is out of its range.
    """
    check_pass("dropping", tokens, batch_size)
    numbers = _drops(subject, drops)
    losses, counted = [], 0
    for drop in numbers:
        steering = Dropping(subject.steering, drop)
        sums_G3 = document_sums(subject, tokens, batch_size, steering, f"dropping {drop} experts")
        nats, counted = sums_G3.sum(0)[0].item(), int(sums_G3[:, 1].sum())
        losses.append(nats / counted)
    curve = [
        {"drop": drop, "loss": loss, "ppl": perplexity(loss, 1)} for drop, loss in zip(numbers, losses, strict=True)
    ]
    record = {
        "definition": DEFINITION,
        "tokens": counted,
        "metrics": {f"ppl_drop_{point['drop']}": point["ppl"] for point in curve},
        "curve": curve,
    }
    stand_in = "none stands in" if subject.ragged else f"{subject.top_k} of those left are chosen"
    note = f"{counted:,} tokens; {subject.num_experts} experts, of which {stand_in}."
    return Result([_table(curve)], [note], record)


def _drops(subject: Subject, drops: list[int] | None) -> list[int]:
    if not subject.num_experts:
        raise UnsuitedError(f"analysis.dropping drops experts, and {subject.path} has none: its model is dense")
    most = subject.choosable - subject.top_k
    if drops is None:
        return list(range(most + 1))
    if not (drops and all(0 <= drop <= most for drop in drops)):
        raise UserError(
            f"analysis.dropping.drops={drops} must be null or a list of whole numbers from 0 to {most}, so that "
            f"model.top_k={subject.top_k} of {subject.choosable} experts are left"
        )
    return sorted(set(drops))


def _table(curve: list[dict[str, Any]]) -> Table:
    rows = []
    for point in curve:
        ratio = math.exp(min(point["loss"] - curve[0]["loss"], 700))
        rows.append([str(point["drop"]), f"{point['loss']:.4f}", f"{point['ppl']:,.3f}", f"{ratio:.4f}"])
    headings = ("dropped", "loss", "ppl", "ppl / first")
    return numbers_table("each token without its best experts", headings, rows, texts=0)

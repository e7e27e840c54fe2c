"""The analysis `dropping`: the loss when the best experts of each token are masked and the next ones replace them.

Reference: arXiv 2506.14038, section 4.3 and figure 4; protocol of DeepSeekMoE (arXiv 2401.06066).
Shapes: N tokens, E experts, K experts per token, G documents.
"""

import math
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from simbal.analysis.quality import document_sums
from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, require_routers
from simbal.errors import UserError
from simbal.metrics.definitions import perplexity
from simbal.model.router import Candidates, Steering, SteeringWrapper, topk_indices

DEFINITION = {
    "dropping": "in all layers, the d best experts of each token are masked, and the token goes to the K best of the "
    "rest (no replacement if the number of experts varies by token); the router computes the gate weights as usual",
    "loss": "cross-entropy in nats, mean over tokens; no auxiliary loss, no z-loss",
    "ppl_drop_<d>": "exp of the loss with d experts masked; d = 0 is the unchanged model",
}


@dataclass(frozen=True)
class Dropping(SteeringWrapper):
    """A `Steering` that masks the `drop` experts of each token with the highest scores of `strategy`."""

    strategy: Steering
    drop: int

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores (N, E), with -inf for the `drop` largest."""
        scores_NE = self.strategy.choice_scores(candidates)
        return scores_NE.scatter(1, topk_indices(scores_NE, self.drop), -math.inf)


def dropping(
    subject: Subject, tokens: PositiveInt | None, batch_size: PositiveInt, drops: list[NonNegativeInt] | None
) -> Result:
    """Measure loss and perplexity for each number of dropped experts.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.
        drops: numbers of experts to drop, at most E - K; None: 0 to E - K.

    Raises:
        UserError: the model is dense, or fewer than K experts would remain.
    """
    require_routers(subject, "dropping")
    most = subject.choosable - subject.top_k
    drops = sorted(set(range(most + 1) if drops is None else drops))
    if not drops or drops[-1] > most:
        raise UserError(
            f"analysis.dropping.drops={drops} must be null or a list of whole numbers from 0 to {most}, so that "
            f"model.top_k={subject.top_k} of {subject.choosable} experts remain"
        )
    curve = []
    for drop in drops:
        steering = Dropping(subject.steering, drop)
        sums_G3 = document_sums(subject, tokens, batch_size, steering, f"dropping {drop} experts")
        nats, counted, _ = sums_G3.sum(0).tolist()
        loss = nats / counted
        curve.append({"drop": drop, "loss": loss, "ppl": perplexity(loss, 1)})
    record = {
        "definition": DEFINITION,
        "tokens": int(counted),
        "metrics": {f"ppl_drop_{point['drop']}": point["ppl"] for point in curve},
        "curve": curve,
    }
    rows = []
    for point in curve:
        ratio = math.exp(min(point["loss"] - curve[0]["loss"], 700))
        rows.append([str(point["drop"]), f"{point['loss']:.4f}", f"{point['ppl']:,.3f}", f"{ratio:.4f}"])
    headings = ("dropped", "loss", "ppl", "ppl / first")
    table = numbers_table("best experts of each token dropped", headings, rows, texts=0)
    rest = "without replacement" if subject.ragged else f"{subject.top_k} of the remaining ones are chosen"
    return Result([table], [f"{record['tokens']:,} tokens; {subject.num_experts} experts, {rest}."], record)

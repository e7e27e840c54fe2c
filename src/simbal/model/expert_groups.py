"""Groups of experts: a token's experts lie in few of them, as on few nodes, and the others are closed to it.

Reference: DeepSeek-V2 (arXiv 2405.04434) by the best expert of a group, V3 (arXiv 2412.19437) by the best two.
Shapes: N tokens, E experts, G groups of e = E/G neighbouring experts, k experts by which a group is judged.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from simbal.model.router import largest


@dataclass(frozen=True)
class Groups:
    """The limit of a token's choice to experts of its `chosen` best groups.

    A group is as good as its best expert (`score=best`) or its two best together (`best two`).
    """

    count: int
    chosen: int
    score: Literal["best", "best two"]

    def limited(self, scores_NE: Tensor) -> Tensor:
        """Return the scores with -inf for the experts of all other groups: a score may be negative, so 0 is no limit.

        Ties go to the lowest group.
        """
        if self.chosen == self.count:
            return scores_NE
        scores_NGe = scores_NE.reshape(len(scores_NE), self.count, -1)
        best_NGk = scores_NGe.topk(1 if self.score == "best" else min(2, scores_NGe.shape[2]), dim=2).values
        chosen_NG = largest(best_NGk.sum(2), self.chosen)
        open_NG = torch.zeros_like(scores_NGe[:, :, 0], dtype=torch.bool).scatter(1, chosen_NG, True)
        return scores_NGe.masked_fill(~open_NG[:, :, None], -math.inf).flatten(1)

"""The analysis `coactivation`: which experts of a layer are chosen together.

Reference: arXiv 2409.02060 (OLMoE). The metric `companion` is ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token.
"""

from statistics import fmean

import torch
from pydantic import PositiveInt
from torch import Tensor

from simbal.analysis.result import Result, layer_table
from simbal.analysis.subject import NotApplicableError, Subject, require_fixed_top_k
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Routing

MAX_COUNTS = 1 << 20  # more pair counts would make the file too large
DEFINITION = {
    "coactivation": "A_ij = tokens that chose both i and j / tokens that chose i. With K experts per token, the A_ij "
    "of an expert i sum to K - 1 over j != i, so their mean is (K-1)/(E-1) for any router",
    "largest": "largest A_ij with i != j over all experts that were chosen; maximum over layers",
    "companion": "share of all choices whose token also chose the most frequent companion of the chosen expert, "
    "sum_i max_j M_ij / sum_i M_ii, j != i; mean over layers",
    "together": "M_ij with j >= i for each layer, row by row: tokens that chose both i and j, or i for M_ii; "
    "A_ij = M_ij / M_ii",
}


def coactivation(subject: Subject, tokens: PositiveInt | None, batch_size: PositiveInt) -> Result:
    """Count which experts the tokens of the validation split choose together, in each layer.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.

    Raises:
        NotApplicableError: the model is dense, has one expert per token, or the number of experts varies by token.
    """
    require_fixed_top_k(subject, "coactivation")
    num_experts, top_k = subject.num_experts, subject.top_k
    if top_k < 2:
        raise NotApplicableError(f"analysis=coactivation needs two experts per token, but {subject.path} has one")
    together_LEE = torch.tensor(0)
    for batch in subject.track_predictions("coactivation", batch_size, tokens):
        together_LEE = together_LEE + torch.stack([count_together(routing) for routing in batch.routings]).cpu()
    pairs = [closest_pair(together_EE) for together_EE in together_LEE]
    largest, i_L, j_L = (list(column) for column in zip(*pairs, strict=True))
    layers = {"largest": largest, "companion": [companion_share(together_EE) for together_EE in together_LEE]}
    tokens_per_expert = together_LEE.diagonal(dim1=1, dim2=2).tolist()
    metrics = {"largest": max(layers["largest"]), "companion": fmean(layers["companion"])}
    record = {
        "definition": DEFINITION,
        "tokens": subject.num_sequences(tokens) * subject.seq_len,
        "num_experts": num_experts,
        "top_k": top_k,
        "chance": (top_k - 1) / (num_experts - 1),
        "metrics": metrics,
        "layers": layers
        | {"largest_pair": [[i, j] for i, j in zip(i_L, j_L, strict=True)], "tokens_per_expert": tokens_per_expert},
    }
    notes = [
        f"{record['tokens']:,} tokens. A_ij: share of expert i's tokens that also chose expert j. With random choices "
        f"of {top_k} of {num_experts} experts it is {record['chance']:.4f}. Popular experts are frequent companions "
        "of all others.",
        "companion: share of choices whose token also chose the most frequent companion. The last row shows the "
        "largest A_ij over all layers and the mean companion share.",
    ]
    if len(together_LEE) * num_experts * (num_experts + 1) // 2 <= MAX_COUNTS:
        record["together"] = [
            [row_E[i:].tolist() for i, row_E in enumerate(together_EE)] for together_EE in together_LEE
        ]
    else:
        notes.append(f"The counts of pairs are not saved, because there are more than {MAX_COUNTS:,}.")
    columns = {
        "largest": ("largest A_ij", ".4f"), "companion": ("companion", ".4f"), "i": ("i", "d"), "j": ("j", "d"),
        "tokens_of_i": ("tokens of i", ",d"),
    }  # fmt: skip
    tokens_of_i = [counts[i] for counts, i in zip(tokens_per_expert, i_L, strict=True)]
    table = layer_table(
        "experts chosen together", columns, layers | {"i": i_L, "j": j_L, "tokens_of_i": tokens_of_i}, {"all": metrics}
    )
    return Result([table], notes, record)


def count_together(routing: Routing) -> Tensor:
    """Return how many tokens chose each pair of experts, (E, E) int64; the diagonal counts tokens per expert."""
    num_experts = routing.logits_NE.shape[-1]
    chosen_NE = chosen_experts(routing.topk_experts_NK, num_experts).double()  # exact up to 2^53 tokens
    return (chosen_NE.T @ chosen_NE).long()


def closest_pair(together_EE: Tensor) -> tuple[float, int, int]:
    """Return the largest A_ij with i != j, and its i and j (the first in case of ties)."""
    counts_E1 = together_EE.diagonal()[:, None]
    shares_EE = _off_diagonal(together_EE).double() / counts_E1.clamp(min=1)
    return (shares_EE.max().item(), *divmod(int(shares_EE.argmax()), len(shares_EE)))


def companion_share(together_EE: Tensor) -> float:
    """Return the share of choices whose token also chose the most frequent companion of the chosen expert."""
    return (_off_diagonal(together_EE).amax(1).sum() / together_EE.diagonal().sum()).item()


def _off_diagonal(together_EE: Tensor) -> Tensor:
    return together_EE - together_EE.diagonal().diag()

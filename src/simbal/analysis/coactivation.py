"""The analysis `coactivation`: which experts of a layer are chosen together.

Reference: arXiv 2409.02060 (OLMoE); the number `companion` is ours.
Shapes: N tokens, L MoE layers, E experts.
"""

from statistics import fmean
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, UnsuitedError, check_pass, fixed_choices_of
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Routing

MOST = 1 << 20  # counts in a file, which a reader takes up to 16 MiB of
DEFINITION = {
    "coactivation": "A_ij = tokens that chose both i and j / tokens that chose i; with K experts for every token the "
    "A_ij of an expert i sum to K - 1 over all j but i, so that their mean is (K-1)/(E-1) whatever the router does",
    "largest": "largest A_ij with i != j, over all experts that were chosen; largest of the layers",
    "companion": "share of all choices whose token also chose that expert which most often goes with the chosen one, "
    "sum_i max_j M_ij / sum_i M_ii, j != i; mean over layers",
    "together": "for each layer M_ij with j >= i, row by row: tokens that chose both i and j, M_ii those that chose i; "
    "A_ij = M_ij / M_ii",
}


def coactivation(subject: Subject, tokens: int | None, batch_size: int) -> Result:
    """Count which experts the tokens of the validation windows choose together, in each layer.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.

    Raises:
        UserError: the model is dense or gives a token any number of experts, a token has one expert, or a key is out of
            its range.
    """
    check_pass("coactivation", tokens, batch_size)
    fixed_choices_of(subject, "coactivation")
    if subject.top_k < 2:
        raise UnsuitedError(
            f"analysis=coactivation is of experts of one token, and {subject.path} gives each token one"
        )
    num_batches, together_LEE = subject.num_batches(batch_size, tokens), torch.tensor(0)
    for batch in track(subject.predict(batch_size, tokens), "coactivation", num_batches, transient=True):
        together_LEE = together_LEE + torch.stack([together(routing) for routing in batch.routings]).cpu()
    record = _record(subject, tokens, together_LEE)
    num_layers, num_experts, _ = together_LEE.shape
    if written := num_layers * num_experts * (num_experts + 1) // 2 <= MOST:
        record["together"] = [_triangle(together_EE) for together_EE in together_LEE]
    return Result([_table(record)], _notes(record, written), record)


def _record(subject: Subject, tokens: int | None, together_LEE: Tensor) -> dict[str, Any]:
    pairs = [closest_pair(together_EE) for together_EE in together_LEE]
    largest, companions = [share for share, _, _ in pairs], [companion(together_EE) for together_EE in together_LEE]
    return {
        "definition": DEFINITION,
        "tokens": subject.num_tokens(tokens),
        "num_experts": subject.num_experts,
        "top_k": subject.top_k,
        "chance": (subject.top_k - 1) / (subject.num_experts - 1),
        "metrics": {"largest": max(largest), "companion": fmean(companions)},
        "layers": {
            "largest": largest,
            "companion": companions,
            "largest_pair": [[i, j] for _, i, j in pairs],
            "tokens_per_expert": [together_EE.diagonal().tolist() for together_EE in together_LEE],
        },
    }


def together(routing: Routing) -> Tensor:
    """Return the tokens that chose both of two experts, (E, E) int64; on the diagonal those that chose the one."""
    num_experts = routing.logits_NE.shape[-1]
    chosen_NE = chosen_experts(routing.topk_experts_NK, num_experts).double()  # whole numbers up to 2^53
    return (chosen_NE.T @ chosen_NE).long()


def closest_pair(together_EE: Tensor) -> tuple[float, int, int]:
    """Return the largest A_ij with its i and j, which differ; of equal ones the first."""
    counts_E1 = together_EE.diagonal()[:, None]
    shares_EE = _of_others(together_EE).double() / counts_E1.clamp(min=1)
    return (shares_EE.max().item(), *divmod(int(shares_EE.argmax()), len(shares_EE)))


def companion(together_EE: Tensor) -> float:
    """Return the share of choices that go with the most frequent companion of their expert."""
    return (_of_others(together_EE).amax(1).sum() / together_EE.diagonal().sum()).item()


def _of_others(together_EE: Tensor) -> Tensor:
    return together_EE - together_EE.diagonal().diag()


def _triangle(together_EE: Tensor) -> list[list[int]]:
    return [row_E[index:].tolist() for index, row_E in enumerate(together_EE)]


def _table(record: dict[str, Any]) -> Table:
    layers, metrics = record["layers"], record["metrics"]
    rows = []
    for layer, (i, j) in enumerate(layers["largest_pair"]):
        tokens_of_i = f"{layers['tokens_per_expert'][layer][i]:,}"
        shares = (f"{layers[name][layer]:.4f}" for name in ("largest", "companion"))
        rows.append([str(layer), *shares, str(i), str(j), tokens_of_i])
    last = ["all", f"{metrics['largest']:.4f}", f"{metrics['companion']:.4f}"]
    headings = ("layer", "largest A_ij", "companion", "i", "j", "tokens of i")
    return numbers_table("experts chosen together", headings, rows, [last])


def _notes(record: dict[str, Any], written: bool) -> list[str]:
    said = [
        f"{record['tokens']:,} tokens. A_ij: of the tokens that chose i, the share that chose j too. {record['top_k']} "
        f"of {record['num_experts']} experts by chance: {record['chance']:.4f} each. An expert with many tokens is "
        "a companion of all.",
        "companion: share of choices that go with the most frequent companion of their expert. The last line has the "
        "largest A_ij of all layers, and the mean companion.",
    ]
    return said if written else [*said, f"The counts of pairs are left out: they are more than {MOST:,} numbers."]

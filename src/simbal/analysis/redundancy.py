"""The analysis `redundancy`: the pairwise expert similarity (PES) of every layer of a run.

Reference: arXiv 2506.14038, section 4.1 and table 4.
Shapes: B sequences, S sequence length, N tokens, L MoE layers, E experts, K experts per token.
"""

import math
import time
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, UnsuitedError, check_pass
from simbal.model.expert_similarity import ExpertSimilarity

DEFINITION = {
    "pes": "mean cosine over all pairs of experts of their raw outputs on a layer's input, mean over tokens; "
    "an output of length 0 counts as cosine 0",
    "min_pes": "smallest pes of the layers",
    "mean_pes": "mean pes of the layers",
    "<number>_se": "its standard error: standard deviation over tokens by the root of their number, tokens taken as "
    "independent",
    "cost.seconds": "of the pass with all experts by those of a plain pass over the same tokens, head and loss "
    "included: processor time of all threads on a CPU, time on a clock on CUDA",
    "cost.flops": "matrix products of the same two passes",
}
OVER_LAYERS = {"minimum": "min_pes", "mean": "mean_pes"}  # lines of the table


def redundancy(subject: Subject, tokens: int | None, batch_size: int) -> Result:
    """Measure the PES of each layer with its standard error, and what measuring it costs.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it bounds the memory and does not change the numbers.

    Raises:
        UserError: the model has fewer than two experts, or a key is out of its range.
    """
    if subject.num_experts < 2:
        raise UnsuitedError(f"analysis.redundancy compares experts, and {subject.path} has {subject.num_experts}")
    check_pass("redundancy", tokens, batch_size)
    next(subject.predict(batch_size, tokens))  # whatever is slow once is in neither pass
    plain_seconds = _pass_seconds(subject, tokens, batch_size, "plain pass")
    with subject.similarity() as seen:
        seconds = _pass_seconds(subject, tokens, batch_size, "all experts")
    pes_L, se_L, metrics = summary(seen.similarity_LN)
    cost = {
        "seconds": seconds / plain_seconds,
        "flops": subject.every_expert_flops(),
        "plain_seconds": plain_seconds,
    }
    record = {
        "definition": DEFINITION,
        "tokens": seen.similarity_LN.shape[1],
        "metrics": metrics,
        "layers": {"pes": pes_L, "pes_se": se_L, "zero_outputs": seen.zero_outputs_L},
        "cost": cost,
    }
    return Result([_table(pes_L, se_L, metrics)], _notes(record, seen), record)


def summary(similarity_LN: Tensor) -> tuple[list[float], list[float], dict[str, float]]:
    """Return the PES of each layer, their standard errors, and the metrics over layers.

    The standard error of the minimum is that of its layer; that of the mean allows for layers that agree on a token.
    """
    root = math.sqrt(similarity_LN.shape[1])
    pes_L, se_L = similarity_LN.mean(1), similarity_LN.std(1) / root
    lowest = int(pes_L.argmin())
    metrics = {
        "min_pes": pes_L[lowest].item(),
        "mean_pes": pes_L.mean().item(),
        "min_pes_se": se_L[lowest].item(),
        "mean_pes_se": (similarity_LN.mean(0).std() / root).item(),
    }
    return pes_L.tolist(), se_L.tolist(), metrics


def _pass_seconds(subject: Subject, tokens: int | None, batch_size: int, title: str) -> float:
    cuda = subject.device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    started = clock()
    for _ in track(subject.predict(batch_size, tokens), title, subject.num_batches(batch_size, tokens), transient=True):
        pass
    if cuda:
        torch.cuda.synchronize(subject.device)
    return clock() - started


def _table(pes_L: list[float], se_L: list[float], metrics: dict[str, float]) -> Table:
    rows = [[str(layer), *_cells(*both)] for layer, both in enumerate(zip(pes_L, se_L, strict=True))]
    last = [[name, *_cells(metrics[key], metrics[f"{key}_se"])] for name, key in OVER_LAYERS.items()]
    return numbers_table("pairwise expert similarity (PES)", ("layer", "PES", "standard error"), rows, last)


def _cells(pes: float, se: float) -> tuple[str, str]:
    return f"{pes:.5f}", f"{se:.1e}"


def _notes(record: dict[str, Any], seen: ExpertSimilarity) -> list[str]:
    cost, zeros = record["cost"], sum(seen.zero_outputs_L)
    notes = [
        f"{record['tokens']:,} tokens, each through all experts of every layer.",
        f"Cost: {cost['seconds']:.2f} times the seconds and {cost['flops']:.2f} times the FLOPs of a plain pass.",
    ]
    return [*notes, f"{zeros:,} outputs had length 0: their pairs count as cosine 0."] if zeros else notes

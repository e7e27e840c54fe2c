"""The analysis `redundancy`: the pairwise expert similarity (PES) of each layer.

Reference: arXiv 2506.14038, section 4.1 and table 4.
Shapes: N tokens, L MoE layers.
"""

import math
import time
from collections.abc import Sequence

import torch
from pydantic import PositiveInt
from torch import Tensor

from simbal.analysis.result import Result, layer_table
from simbal.analysis.subject import NotApplicableError, Subject

DEFINITION = {
    "pes": "mean cosine over all pairs of experts of their outputs on a layer's input, mean over tokens; an output of "
    "length 0 counts as cosine 0",
    "min_pes": "PES, minimum over layers",
    "mean_pes": "PES, mean over layers",
    "<number>_se": "standard error: standard deviation over tokens divided by the square root of their number, which "
    "assumes independent tokens",
    "cost.seconds": "time of a pass with all experts divided by the time of a plain pass over the same tokens, "
    "including head and loss: CPU time of all threads on a CPU, wall time on CUDA",
    "cost.flops": "the same ratio for the FLOPs of matrix products",
}


def redundancy(subject: Subject, tokens: PositiveInt | None, batch_size: PositiveInt) -> Result:
    """Measure the PES of each layer with its standard error, and the cost of measuring it.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.

    Raises:
        NotApplicableError: the model has fewer than two experts.
    """
    if subject.num_experts < 2:
        raise NotApplicableError(f"analysis=redundancy needs two experts, but {subject.path} has {subject.num_experts}")
    flops = subject.every_expert_flops()
    next(subject.predict(batch_size, tokens))  # warm up, so that neither timed pass pays for it
    plain_seconds = _time_pass(subject, tokens, batch_size, "plain pass")
    with subject.similarity() as similarity:
        seconds = _time_pass(subject, tokens, batch_size, "all experts")
    pes_L, se_L, metrics = summarize(similarity.similarity_LN)
    ratios = {"seconds": seconds / plain_seconds, "flops": flops}
    layers: dict[str, Sequence[float]] = {"pes": pes_L, "pes_se": se_L, "zero_outputs": similarity.zero_outputs_L}
    record = {
        "definition": DEFINITION,
        "tokens": similarity.similarity_LN.shape[1],
        "metrics": metrics,
        "layers": layers,
        "cost": ratios | {"plain_seconds": plain_seconds},
    }
    columns = {"pes": ("PES", ".5f"), "pes_se": ("standard error", ".1e")}
    last = {
        "minimum": {"pes": metrics["min_pes"], "pes_se": metrics["min_pes_se"]},
        "mean": {"pes": metrics["mean_pes"], "pes_se": metrics["mean_pes_se"]},
    }
    notes = [
        f"{record['tokens']:,} tokens, each computed by all experts of every layer.",
        f"Cost: {ratios['seconds']:.2f} times the time and {ratios['flops']:.2f} times the FLOPs of a plain pass.",
    ]
    if zeros := sum(similarity.zero_outputs_L):
        notes.append(f"{zeros:,} outputs have length 0; their pairs count as cosine 0.")
    return Result([layer_table("pairwise expert similarity (PES)", columns, layers, last)], notes, record)


def summarize(similarity_LN: Tensor) -> tuple[list[float], list[float], dict[str, float]]:
    """Return the PES of each layer, their standard errors, and the metrics over layers.

    The minimum has the standard error of its layer. The error of the mean accounts for correlation between layers.
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


def _time_pass(subject: Subject, tokens: int | None, batch_size: int, title: str) -> float:
    """Return the seconds of a forward pass over the tokens."""
    on_cuda = subject.device.type == "cuda"
    clock = time.perf_counter if on_cuda else time.process_time
    start = clock()
    for _ in subject.track_predictions(title, batch_size, tokens):
        pass
    if on_cuda:
        torch.cuda.synchronize(subject.device)
    return clock() - start

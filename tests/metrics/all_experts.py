"""Pairwise expert similarity (PES) from the outputs of all experts."""

from torch import Tensor

from simbal.metrics.similarity import RunningSimilarity


def pairwise_expert_similarity(outputs_END: Tensor) -> Tensor:
    """Return C of each token, (N,)."""
    running = RunningSimilarity()
    for output_ND in outputs_END:
        running.add(output_ND)
    return running.similarity_N

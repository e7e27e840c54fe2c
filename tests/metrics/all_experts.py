"""PES from all outputs at once, for tests that have them."""

from torch import Tensor

from simbal.metrics.similarity import RunningSimilarity


def pairwise_expert_similarity(outputs_END: Tensor) -> Tensor:
    """C of each token, (N,), from all experts' outputs at once."""
    running = RunningSimilarity()
    for output_ND in outputs_END:
        running.add(output_ND)
    return running.similarity_N

"""Pairwise expert similarity (PES) while a run trains.

Shapes: B sequences, T = sequence length + 1, L MoE layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor

from simbal.data.loader import TokenData
from simbal.model.expert_similarity import watched
from simbal.training.lit_moe import LitMoE

DEFINITIONS = {
    "pes/min": "smallest PES of the layers: mean cosine over pairs of experts of their outputs on a token, mean over "
    "trainer.pes_tokens tokens of the validation set",
    "pes/mean": "mean of the same over layers",
}


@dataclass(frozen=True)
class PES:
    """Measured at every `every`-th step (0: never) on the first `tokens` validation tokens, on every rank alike."""

    every: int
    tokens: int

    def due(self, step: int, module: LitMoE) -> bool:
        """Whether to measure after `step`."""
        return self.measures(module) and step % self.every == 0

    def measures(self, module: LitMoE) -> bool:
        """Whether the run's PES is measured at all; there are no pairs in a model of fewer than two experts."""
        return self.every > 0 and module.model.shape.num_experts >= 2

    @torch.no_grad()
    def measure(self, trainer: L.Trainer, module: LitMoE) -> dict[str, Any]:
        """The part of a row of metrics.jsonl, in evaluation mode; nothing that the run depends on changes."""
        training = module.training
        module.eval()
        try:
            with trainer.precision_plugin.forward_context(), watched(module.model.feed_forwards) as seen:
                for windows_BT in self._windows(trainer):
                    module.model(windows_BT[:, :-1].to(module.device), module.balancing)
        finally:
            module.train(training)
        pes_L = seen.similarity_LN.mean(1).tolist()
        return {"pes/min": min(pes_L), "pes/mean": sum(pes_L) / len(pes_L), "layers": {"pes": pes_L}}

    def _windows(self, trainer: L.Trainer) -> Iterator[Tensor]:
        """Whole windows, at least one."""
        left = None
        for windows_BT in cast(TokenData, trainer.datamodule).whole_validation():  # type: ignore[attr-defined]
            left = max(1, self.tokens // (windows_BT.shape[1] - 1)) if left is None else left
            yield windows_BT[:left]
            left -= len(windows_BT)
            if left <= 0:
                return

"""The MoE layers of a trained run, for analyses that compare layers."""

from simbal.analysis.trained import TrainedRun
from simbal.errors import UserError
from simbal.model.moe import MoELayer


def moe_layers(trained: TrainedRun, analysis: str) -> list[MoELayer]:
    """In the order of the blocks; `UserError` for a dense model, on which `analysis` has nothing to do."""
    layers = [layer for layer in trained.model.feed_forwards if isinstance(layer, MoELayer)]
    if not layers:
        raise UserError(f"{trained.path} is a dense model: analysis={analysis} works on routers")
    return layers

"""Balancing strategies, also for models that are not ours: `SimBal(coef=0.1).of_weight(weight_ED)` is a loss.

Those that look at tokens take a `Routing`, which `Routing.of_logits(logits_NE, top_k, weight_ED)` makes. All of them:
`simbal.attach`, for a model of Hugging Face transformers. Neither Hydra nor Lightning is imported.

No torch here: a name is imported when it is first asked for, because a sweep's parent reads `balancing.schedule`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simbal.balancing.base import Balancing, FinishedStep, Properties
    from simbal.balancing.composition import Composition
    from simbal.balancing.controls import HashRouting, UniformRouting
    from simbal.balancing.geometry import ErnieOrthogonalLoss, OffDiagonalCosine, RowNorm
    from simbal.balancing.lbl import LoadBalancingLoss
    from simbal.balancing.lbl_hf import PooledLoadBalancingLoss
    from simbal.balancing.logit_norm import LogitNorm
    from simbal.balancing.loss_free import LossFree
    from simbal.balancing.none import NoBalancing
    from simbal.balancing.orthogonal import OrthogonalInit, OrthogonalParametrization
    from simbal.balancing.quantile import QuantileBalancing
    from simbal.balancing.router_z_loss import RouterZLoss
    from simbal.balancing.schedule import Schedule
    from simbal.balancing.simbal import SimBal
    from simbal.balancing.sinkhorn import Sinkhorn
    from simbal.model.router import Routing

PLACES = {
    "base": ("Balancing", "FinishedStep", "Properties"),
    "composition": ("Composition",),
    "controls": ("HashRouting", "UniformRouting"),
    "geometry": ("ErnieOrthogonalLoss", "OffDiagonalCosine", "RowNorm"),
    "lbl": ("LoadBalancingLoss",),
    "lbl_hf": ("PooledLoadBalancingLoss",),
    "logit_norm": ("LogitNorm",),
    "loss_free": ("LossFree",),
    "none": ("NoBalancing",),
    "orthogonal": ("OrthogonalInit", "OrthogonalParametrization"),
    "quantile": ("QuantileBalancing",),
    "router_z_loss": ("RouterZLoss",),
    "schedule": ("Schedule",),
    "simbal": ("SimBal",),
    "sinkhorn": ("Sinkhorn",),
}
MODULE_OF = {name: f"{__name__}.{module}" for module, names in PLACES.items() for name in names}
MODULE_OF["Routing"] = "simbal.model.router"

__all__ = [
    "Balancing",
    "Composition",
    "ErnieOrthogonalLoss",
    "FinishedStep",
    "HashRouting",
    "LoadBalancingLoss",
    "LogitNorm",
    "LossFree",
    "NoBalancing",
    "OffDiagonalCosine",
    "OrthogonalInit",
    "OrthogonalParametrization",
    "PooledLoadBalancingLoss",
    "Properties",
    "QuantileBalancing",
    "RouterZLoss",
    "Routing",
    "RowNorm",
    "Schedule",
    "SimBal",
    "Sinkhorn",
    "UniformRouting",
]


def __getattr__(name: str) -> Any:
    """The class `name`, from the module that defines it."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

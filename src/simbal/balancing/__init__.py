"""Balancing strategies, also for models that are not ours: `SimBal(coef=0.1).of_weight(weight_ED)` is a loss.

Those that look at tokens take a `Routing`, which `Routing.of_logits(logits_NE, top_k, weight_ED)` makes. All of them:
`simbal.attach`, for a model of Hugging Face transformers. Neither Hydra nor Lightning is imported.

No torch here: a name is imported when it is first asked for, because a sweep's parent reads `balancing.schedule`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# a type checker cannot follow `__getattr__`: it reads these lines, whose `as` says that the name is exported
if TYPE_CHECKING:
    from simbal.balancing.base import Balancing as Balancing
    from simbal.balancing.base import FinishedStep as FinishedStep
    from simbal.balancing.base import Properties as Properties
    from simbal.balancing.composition import Composition as Composition
    from simbal.balancing.controls import HashRouting as HashRouting
    from simbal.balancing.controls import UniformRouting as UniformRouting
    from simbal.balancing.geometry import ErnieOrthogonalLoss as ErnieOrthogonalLoss
    from simbal.balancing.geometry import OffDiagonalCosine as OffDiagonalCosine
    from simbal.balancing.geometry import RowNorm as RowNorm
    from simbal.balancing.lbl import LoadBalancingLoss as LoadBalancingLoss
    from simbal.balancing.lbl_hf import PooledLoadBalancingLoss as PooledLoadBalancingLoss
    from simbal.balancing.logit_norm import LogitNorm as LogitNorm
    from simbal.balancing.loss_free import LossFree as LossFree
    from simbal.balancing.none import NoBalancing as NoBalancing
    from simbal.balancing.orthogonal import OrthogonalInit as OrthogonalInit
    from simbal.balancing.orthogonal import OrthogonalParametrization as OrthogonalParametrization
    from simbal.balancing.quantile import QuantileBalancing as QuantileBalancing
    from simbal.balancing.router_z_loss import RouterZLoss as RouterZLoss
    from simbal.balancing.simbal import SimBal as SimBal
    from simbal.balancing.sinkhorn import Sinkhorn as Sinkhorn
    from simbal.config.schedule import Schedule as Schedule
    from simbal.model.router import Routing as Routing

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
    "simbal": ("SimBal",),
    "sinkhorn": ("Sinkhorn",),
}
MODULE_OF = {name: f"{__name__}.{module}" for module, names in PLACES.items() for name in names}
MODULE_OF |= {"Routing": "simbal.model.router", "Schedule": "simbal.config.schedule"}
__all__ = list(MODULE_OF)


def __getattr__(name: str) -> Any:
    """The class `name`, from the module that defines it."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Balancing strategies, also for models that are not ours: `SimBal(coef=0.1).of_weight(weight_ED)` is a loss.

Those that look at tokens take a `Routing`, which `Routing.of_logits(logits_NE, top_k, weight_ED)` makes. All of them:
`simbal.attach`, for a model of Hugging Face transformers. Neither Hydra nor Lightning is imported.
"""

from simbal.balancing.base import Balancing, FinishedStep, Properties, WeightLoss
from simbal.balancing.bias_controller import BiasController
from simbal.balancing.capacity import Capacity
from simbal.balancing.composition import Composition
from simbal.balancing.controls import FrozenRouter, HashRouting, UniformRouting
from simbal.balancing.cosine import CosineRouter
from simbal.balancing.dynamic_quantile import DynamicQuantile
from simbal.balancing.expert_choice import ExpertChoice
from simbal.balancing.expert_overlap import ExpertOverlap
from simbal.balancing.expert_router_coupling import ExpertRouterCoupling
from simbal.balancing.expert_threshold import ExpertThreshold
from simbal.balancing.geometry import ErnieOrthogonalLoss, OffDiagonalCosine, RowNorm
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.lbl_hf import PooledLoadBalancingLoss
from simbal.balancing.logit_norm import LogitNorm
from simbal.balancing.loss_free import LossFree
from simbal.balancing.none import NoBalancing
from simbal.balancing.orthogonal import OrthogonalInit, OrthogonalMixture, OrthogonalParametrization
from simbal.balancing.prototype import PrototypeRouter
from simbal.balancing.quantile import QuantileBalancing
from simbal.balancing.remoe import ReMoE
from simbal.balancing.router_z_loss import RouterZLoss
from simbal.balancing.simbal import SimBal
from simbal.balancing.sinkhorn import Sinkhorn
from simbal.balancing.temperature import Temperature
from simbal.balancing.top_p import TopP
from simbal.config.schedule import Schedule
from simbal.model.router import Routing

__all__ = [
    "Balancing", "BiasController", "Capacity", "Composition", "CosineRouter", "DynamicQuantile",
    "ErnieOrthogonalLoss", "ExpertChoice", "ExpertOverlap", "ExpertRouterCoupling", "ExpertThreshold", "FinishedStep",
    "FrozenRouter", "HashRouting", "LoadBalancingLoss", "LogitNorm", "LossFree", "NoBalancing", "OffDiagonalCosine",
    "OrthogonalInit", "OrthogonalMixture", "OrthogonalParametrization", "PooledLoadBalancingLoss", "Properties",
    "PrototypeRouter", "QuantileBalancing", "ReMoE", "RouterZLoss", "Routing", "RowNorm", "Schedule", "SimBal",
    "Sinkhorn", "Temperature", "TopP", "UniformRouting", "WeightLoss",
]  # fmt: skip

"""Balancing strategies. They also work in your own training loop: `SimBal(coef=0.1).of_weight(weight_ED)` is a loss.

Losses that depend on tokens take a `Routing`: see `Routing.of_logits`. `simbal.hf.attach` applies any strategy to a
Hugging Face transformers model. This package imports neither Hydra nor Lightning.
"""

from simbal.balancing.base import Balancing, FinishedStep, Properties, WeightLoss
from simbal.balancing.bias import BiasController, LossFree
from simbal.balancing.composition import Composition
from simbal.balancing.controls import FrozenRouter, HashRouting, NoBalancing, UniformRouting
from simbal.balancing.coupling import ExpertRouterCoupling
from simbal.balancing.documents import DocumentPool
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss, RouterZLoss
from simbal.balancing.logits import CosineRouter, LogitNorm, PrototypeRouter, Sinkhorn, Temperature
from simbal.balancing.orthogonal import OrthogonalInit, OrthogonalMixture, OrthogonalParametrization
from simbal.balancing.ragged import ReMoE, TopP
from simbal.balancing.thresholds import Capacity, DynamicQuantile, ExpertChoice, ExpertThreshold, QuantileBalancing
from simbal.balancing.weight_losses import ErnieOrthogonalLoss, ExpertOverlap, OffDiagonalCosine, RowNorm, SimBal
from simbal.config.schedule import Schedule
from simbal.model.router import Routing

__all__ = [
    "Balancing", "BiasController", "Capacity", "Composition", "CosineRouter", "DocumentPool", "DynamicQuantile",
    "ErnieOrthogonalLoss", "ExpertChoice", "ExpertOverlap", "ExpertRouterCoupling", "ExpertThreshold", "FinishedStep",
    "FrozenRouter", "HashRouting", "LoadBalancingLoss", "LogitNorm", "LossFree", "NoBalancing", "OffDiagonalCosine",
    "OrthogonalInit", "OrthogonalMixture", "OrthogonalParametrization", "PooledLoadBalancingLoss", "Properties",
    "PrototypeRouter", "QuantileBalancing", "ReMoE", "RouterZLoss", "Routing", "RowNorm", "Schedule", "SimBal",
    "Sinkhorn", "Temperature", "TopP", "UniformRouting", "WeightLoss",
]  # fmt: skip

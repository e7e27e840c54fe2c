"""A finished run as it is exported: its config, its record and its model; its data need not be there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from simbal.analysis.trained import finished, weights_of
from simbal.balancing.build import build_balancing
from simbal.hub.expressible import require_expressible, require_unsteered
from simbal.model.init import generator, init_router
from simbal.model.transformer import Transformer
from simbal.run_spec import RunSpec
from simbal.training.build import transformer_shape


@dataclass(frozen=True)
class FinishedRun:
    """The model has its final weights, in fp32, on the CPU."""

    path: Path
    spec: RunSpec
    record: dict[str, Any]
    model: Transformer


def read_run(path: Path) -> FinishedRun:
    """The run in a folder, if Mixtral or Llama can express it.

    Raises:
        UserError: no finished run is there, its checkpoint is damaged or another run's, or it cannot be expressed.
    """
    spec, record = finished(path)
    require_expressible(spec, path)
    config = spec.config
    shape = transformer_shape(spec, end_of_text=0)  # which only a document mask needs, and that is refused
    facts = {"num_layers": shape.num_layers, "num_experts": shape.num_experts, "seed": config["seed"]}
    layer_reduce = config["optim"]["aux_layer_reduce"]
    balancing = build_balancing(config["balancing"], facts, config["trainer"]["max_steps"], layer_reduce)
    if shape.num_experts:
        require_unsteered(balancing, shape.num_layers, shape.num_experts, path)
    model = Transformer(shape, "reference" if shape.num_experts else None)
    for router in model.routers:  # rows that a strategy can parametrise; the checkpoint replaces them
        init_router(router.weight_ED, "normal_unit", 1.0, generator(0, "router"))
    balancing.prepare(model.routers)
    module = nn.ModuleDict({"model": model, "balancing": balancing})  # the names that LitMoE gives the two
    module.load_state_dict(weights_of(path / "checkpoints" / "final.ckpt", spec.hash, module))
    return FinishedRun(path, spec, record, model.eval())

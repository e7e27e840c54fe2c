"""A finished run to export: its config, its record and its model; its data need not be there.

Shapes: B sequences, S sequence length, N = B*S tokens, E experts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simbal.analysis.shared.trained import FINAL, finished, weights_of
from simbal.balancing.composition import Composition
from simbal.errors import UserError
from simbal.hub.architecture import architecture, require_expressible
from simbal.model.init import generator, init_router
from simbal.model.router import Candidates, gate
from simbal.model.transformer import Transformer, TransformerShape
from simbal.runs.spec import RunSpec
from simbal.training.build import build_strategies, transformer_shape


@dataclass(frozen=True)
class FinishedRun:
    """A finished run; its model has the final weights, in fp32, on the CPU."""

    path: Path
    spec: RunSpec
    record: dict[str, Any]
    model: Transformer


def read_run(path: Path) -> FinishedRun:
    """Return the run in a folder, if an architecture of transformers can express it.

    Raises:
        UserError: no finished run is there, its checkpoint is damaged or another run's, or it cannot be expressed.
    """
    spec, record = finished(path)
    shape = transformer_shape(spec, end_of_text=0)  # only a document mask needs it, and that is refused
    try:
        require_expressible(shape)
    except UserError as error:
        raise UserError(f"{path} cannot be exported, for its {error}") from None
    balancing = build_strategies(spec, shape)
    if shape.num_experts:
        require_unsteered(balancing, shape, path)
    model = Transformer(shape, "reference" if shape.num_experts else None)
    for router in model.routers:  # rows that a strategy can parametrise; the checkpoint replaces them
        init_router(router.weight_ED, "normal_unit", 1.0, generator(0, "router"))
    balancing.prepare(model.routers)
    module = nn.ModuleDict({"model": model, "balancing": balancing})  # the names that LitMoE gives the two
    module.load_state_dict(weights_of(path / "checkpoints" / FINAL, spec.hash, module, record["steps"]))
    return FinishedRun(path, spec, record, model.eval())


@torch.no_grad()
def require_unsteered(balancing: Composition, shape: TransformerShape, where: object) -> None:
    """Raise `UserError` if a strategy changes a router's logits or choice in evaluation mode.

    It may do so in training. One that changes nothing returns the very logits that it was given.
    """
    logits_NE, tokens_BS = torch.zeros(1, shape.num_experts), torch.zeros(1, 1, dtype=torch.int64)
    theirs = architecture(shape).name
    if balancing.mapper is not None:
        raise UserError(
            f"{where} cannot be exported, for its balancing.{balancing.mapper} maps hidden states to logits: {theirs} "
            "multiplies them by a matrix"
        )
    for name, part in balancing.eval().parts.items():
        if part.adjust_logits(logits_NE) is not logits_NE:
            raise UserError(
                f"{where} cannot be exported, for its balancing.{name} adjusts the router's logits: {theirs} gates "
                "them as they are"
            )
        for layer in range(shape.num_layers):
            candidates = Candidates(layer, tokens_BS, logits_NE, gate(logits_NE, "softmax"), shape.top_k)
            if part.choice_scores(candidates) is not logits_NE:
                raise UserError(
                    f"{where} cannot be exported, for its balancing.{name} steers the choice of experts: {theirs} "
                    "takes those of the largest logits"
                )

"""Reads a folder in Hugging Face's format: one of ours, or any Mixtral or Llama of the same kind.

    from simbal import hub
    model = hub.load("folder")                     # a Transformer; LitMoE and every analysis take it
    hidden_BSD, routings = model(tokens_BS)
    logits_BSV = hidden_BSD @ model.head_VD.T

Shapes: B sequences, S tokens, V vocabulary, D model width.
"""

from os import PathLike
from pathlib import Path

import torch

from simbal.errors import UserError
from simbal.hub.foreign_config import read_shape
from simbal.hub.weight_files import StoredWeight, read_weights, stored_weights
from simbal.hub.weights import count, views
from simbal.model.transformer import Transformer, TransformerShape

SHOWN = 3  # names in an error


def load(folder: str | PathLike[str], backend: str = "reference") -> Transformer:
    """The model of a folder, in fp32, in evaluation mode; `backend` computes its experts, if it has any.

    Only safetensors are read. Nothing is allocated before names and sizes are those that the config.json asks for.

    Raises:
        UserError: a file is missing or damaged, or the model is none of ours; names the key or the weight.
    """
    path = Path(folder)
    shape = read_shape(path / "config.json")
    stored = stored_weights(path)
    _check(stored, shape, path)
    model = Transformer(shape, backend if shape.num_experts else None)
    targets = views(model)
    for name, weight in read_weights(stored):
        targets[name].copy_(weight)
    return model.eval()


def _check(stored: dict[str, StoredWeight], shape: TransformerShape, path: Path) -> None:
    """`UserError` unless exactly the weights of such a model are there."""
    expected = count(shape.num_layers, shape.num_experts)
    if len(stored) < expected:  # before a list is made, of a length that the config alone asks for
        raise UserError(f"{path} has {len(stored)} weights, and a model of its config.json {expected}")
    with torch.device("meta"):
        wanted = {name: tuple(view.shape) for name, view in views(Transformer(shape, "reference")).items()}
    if unknown := sorted(stored.keys() - wanted.keys()):
        raise UserError(f"{path} has weights that our model has not: {', '.join(map(repr, unknown[:SHOWN]))}")
    if missing := sorted(wanted.keys() - stored.keys()):
        raise UserError(f"{path} lacks the weights {', '.join(missing[:SHOWN])}")
    for name, size in wanted.items():
        if stored[name].shape != size:
            raise UserError(f"{path}: {name} has the shape {stored[name].shape}, and by its config.json {size}")

"""The size of a model that is counted is that of the model that is made."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from simbal.cost.parameters import bytes_to_make, count, weights_of
from simbal.model.transformer import Transformer
from tests.cost.test_memory import shape_of

PRESETS = ("tiny", "tiny_dense", "small", "dense_m", "moe_m", "moe_l")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_is_counted_once_with_its_size(preset):
    shape = replace(shape_of(preset), num_layers=3)
    with torch.device("meta"):
        model = Transformer(shape, "reference" if shape.num_experts else None)
    counted = Counter({each.size: 0 for each in weights_of(shape)})
    for each in weights_of(shape):
        counted[each.size] += each.copies
    assert counted == Counter(tuple(parameter.shape) for parameter in model.parameters())
    assert count(weights_of(shape)) == sum(parameter.numel() for parameter in model.parameters())
    assert count(weights_of(shape), "router") == sum(router.weight_ED.numel() for router in model.routers)
    assert bytes_to_make(shape) > 4 * count(weights_of(shape))


def test_no_size_takes_time():
    largest = {"num_layers": 2**50, "d_model": 2**50, "num_experts": 2**50, "d_expert": 2**50, "vocab_size": 2**50}
    assert count(weights_of(shape_of("tiny", **largest))) > 3 * 2**200

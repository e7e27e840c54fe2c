"""Packed documents, padding-free batches and padding give each sequence the loss that it has alone."""

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from simbal.balancing import LoadBalancingLoss, LossFree, RouterZLoss
from simbal.hf import attach
from simbal.hf.hooks import sequence_lengths
from tests.hf.architectures import K, host, padded

LENGTHS = (8, 5, 3)


def documents() -> list[Tensor]:
    return [row[:length] for row, length in zip(padded()["input_ids"], LENGTHS, strict=True)]


def padding_free() -> dict[str, Tensor]:
    """Return the batch of transformers' own collator: one row of all documents, whose position ids restart."""
    return DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": each.tolist()} for each in documents()])


def two_rows() -> dict[str, Tensor]:
    """Return rows of 8 tokens: one document, and two packed documents."""
    first, second, third = documents()
    positions = torch.stack([torch.arange(8), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])])
    return {"input_ids": torch.stack([first, torch.cat([second, third])]), "position_ids": positions}


@pytest.mark.parametrize("inputs", [padding_free(), two_rows(), padded()], ids=["padding_free", "packed", "padded"])
def test_a_loss_per_sequence_is_the_mean_over_documents(inputs):
    model = host()
    weights = [layer.mlp.gate.weight for layer in model.model.layers]
    with attach(model, [LoadBalancingLoss(1.0, scope="sequence"), LossFree(), RouterZLoss()]) as balancing:
        model(**inputs, use_cache=False)  # with a cache, transformers does not separate documents
        assert torch.equal(balancing.counts_LE.sum(1), torch.full((3,), K * sum(LENGTHS)))
        ours = balancing.losses()["LoadBalancingLoss"]
        ours_L, alone = torch.autograd.grad(ours, weights), []
        for document_S in documents():
            model(document_S[None])
            alone.append(balancing.losses()["LoadBalancingLoss"])
    expected = torch.stack(alone).mean()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(ours_L, torch.autograd.grad(expected, weights), rtol=1e-4, atol=1e-7)


def test_rows_that_are_full_sequences_need_no_lengths():
    assert sequence_lengths(torch.Size((2, 4)), None, torch.arange(3, 7)[None]) is None  # positions after a cache
    assert sequence_lengths(torch.Size((2, 4)), None, torch.zeros(3, 2, 4)) is None  # three-dimensional positions
    left_padded_N = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    assert sequence_lengths(torch.Size((2, 4)), left_padded_N, None).tolist() == [3, 4]

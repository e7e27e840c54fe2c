"""What the harness is told is what the model computes."""

import pytest
import torch

from simbal.analysis.harness_model import Ending, endings
from simbal.model.init import initialise
from simbal.model.transformer import Transformer
from tests.model.test_transformer import shape


@pytest.fixture(scope="module")
def model():
    made = Transformer(shape()).eval()
    initialise(made, seed=0, std=0.3, router_init="normal")
    return made


def answers(model, requests, seq_len=32, batch_size=3) -> list[Ending]:
    found = dict(endings(model, None, requests, seq_len, batch_size))
    return [found[place] for place in range(len(requests))]


@torch.no_grad()
def directly(model, context: list[int], continuation: list[int]) -> list[float]:
    """log p of each token of the continuation, in a forward pass of its own."""
    ids_1S = torch.tensor([[*context, *continuation]])
    log_p_SV = (model(ids_1S)[0][0] @ model.head_VD.T).log_softmax(-1)
    return [log_p_SV[len(context) - 1 + place, token].item() for place, token in enumerate(continuation)]


def numbers(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_log_likelihoods_are_those_of_a_direct_computation_in_any_batch(model, batch_size):
    requests = list(zip(numbers(1, 9, 4, 20, 2), numbers(3, 1, 12, 5, 1), strict=True))
    for found, request in zip(answers(model, requests, batch_size=batch_size), requests, strict=True):
        assert found.log_p == pytest.approx(sum(directly(model, *request)), abs=1e-4)


def test_a_text_that_is_too_long_loses_its_start(model):
    (context, continuation) = numbers(30, 5)
    (found,) = answers(model, [(context, continuation)], seq_len=8)
    # 8 inputs: the last 4 of the context and all but the last of the continuation
    assert found.log_p == pytest.approx(sum(directly(model, context[-4:], continuation)), abs=1e-4)


def test_of_a_continuation_that_is_too_long_the_end_is_scored(model):
    (context, continuation) = numbers(3, 20)
    (found,) = answers(model, [(context, continuation)], seq_len=8)
    assert found.log_p == pytest.approx(sum(directly(model, continuation[-9:-8], continuation[-8:])), abs=1e-4)


@torch.no_grad()
def test_greedy_means_that_every_token_was_the_most_probable(model):
    sequence = numbers(4)[0]
    for _ in range(3):
        sequence.append((model(torch.tensor([sequence]))[0][0, -1] @ model.head_VD.T).argmax().item())
    context, best = sequence[:4], sequence[4:]
    worse = [*best[:2], (best[2] + 1) % 61]
    found = answers(model, [(context, best), (context, worse), (context, best[:2])])
    assert [ending.greedy for ending in found] == [True, False, True]

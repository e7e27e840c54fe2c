"""EMO: the tokens of a document choose among the same experts."""

import pytest
import torch

from simbal.balancing.documents import DocumentPool
from simbal.errors import UserError
from simbal.model.router import Candidates, Router
from tests.balancing.example import finished, finite_sets

END = 7
TOKENS_BS = torch.tensor([[1, 2, END, 3, 4, 5, END, END, 6, 1], [END, 2, 2, 2, 2, 2, 2, 2, 2, END]])
DOCUMENTS = [[[0, 1, 2], [3, 4, 5, 6], [7], [8, 9]], [[0], [*range(1, 10)]]]
E, K = 12, 2


def candidates_of(tokens_BS=TOKENS_BS, layer=0, seed=0):
    logits_NE = 3 * torch.randn(tokens_BS.numel(), E, generator=torch.Generator().manual_seed(seed))
    return Candidates(layer, tokens_BS, logits_NE, logits_NE.softmax(-1), K)


def pools(strategy, each) -> list[list[set[int]]]:
    """The pool of each token by sequence."""
    sets = finite_sets(strategy.choice_scores(each))
    return [sets[: len(sets) // 2], sets[len(sets) // 2 :]]


def best(each: Candidates, row: int, positions, size: int) -> set[int]:
    """The experts with the largest sums of probabilities over some positions of a sequence, by a loop."""
    sums = [0.0] * E
    for position in positions:
        logits = each.logits_NE[row * TOKENS_BS.shape[1] + position].double()
        weights = logits.exp() / logits.exp().sum()
        sums = [total + weight for total, weight in zip(sums, weights.tolist(), strict=True)]
    return {*sorted(range(E), key=lambda expert: -sums[expert])[:size]}


def test_a_document_keeps_the_experts_with_the_largest_sums_of_its_probabilities():
    each, strategy = candidates_of(), DocumentPool(END, min_pool=5, max_pool=5)
    found = pools(strategy, each)
    for row, documents in enumerate(DOCUMENTS):
        for document in documents:
            assert all(found[row][position] == best(each, row, document, 5) for position in document)
    kept_NE = strategy.choice_scores(each)
    assert torch.equal(kept_NE[kept_NE > -torch.inf], each.logits_NE[kept_NE > -torch.inf])


def test_in_evaluation_a_pool_sums_the_tokens_so_far():
    each = candidates_of()
    found = pools(DocumentPool(END, eval_pool=4).eval(), each)
    for row, documents in enumerate(DOCUMENTS):
        for document in documents:
            for number, position in enumerate(document):
                assert found[row][position] == best(each, row, document[: number + 1], 4)


def test_pool_sizes_are_uniform_and_drawn_for_each_document_layer_and_step():
    tokens_BS = torch.arange(4000).view(400, 10) % 97 + 8
    strategy = DocumentPool(END, seed=1, min_pool=3, max_pool=6)

    def sizes(layer=0, part=slice(None)) -> list[int]:
        return [len(pool) for pool in finite_sets(strategy.choice_scores(candidates_of(tokens_BS[part], layer)))][::10]

    first = sizes()
    assert first == sizes()
    assert first[200:] == sizes(part=slice(200, None))  # whatever the micro-batch
    assert all(abs(first.count(size) - 100) < 40 for size in (3, 4, 5, 6))
    assert sizes(layer=1) != first
    strategy.update(finished(torch.zeros(1, E)))
    assert sizes() != first


def test_pools_hold_at_least_the_experts_of_a_token_and_at_most_all():
    router = Router(16, E, K, "softmax", True, layer=0)
    for keys, message in [
        ({"min_pool": 1}, "min_pool=1 must be a whole number of at least 2"),
        ({"min_pool": 6, "max_pool": 5}, "max_pool=5 must be a whole number of at least 6"),
        ({"max_pool": 13}, "max_pool=13 must be at most 12"),
        ({"eval_pool": 1}, "eval_pool=1 must be a whole number of at least 2"),
    ]:
        with pytest.raises(UserError, match=message):
            DocumentPool(END, **keys).prepare([router])
    DocumentPool(END).prepare([router])
    with pytest.raises(UserError, match="DocumentPool needs end_of_text"):
        DocumentPool().prepare([router])

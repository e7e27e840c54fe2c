"""Controls and strategies that set the router's weight: hash and random routing, frozen and orthogonal routers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import polar

from simbal.balancing.composition import Composition, build_balancing
from simbal.balancing.controls import HashRouting, UniformRouting, balanced_table, splitmix64, uniform_numbers
from simbal.balancing.logits import LogitNorm
from simbal.balancing.orthogonal import OrthogonalMixture
from simbal.conformance import FACTS, composed_module
from simbal.errors import UserError
from simbal.model.init import init_router, initialize
from simbal.model.router import Candidates, Router, topk_indices
from simbal.model.transformer import Transformer
from simbal.training.build import transformer_shape
from simbal.training.optimizer import parameter_groups
from simbal.training.run import train
from tests.balancing.cases import registered
from tests.balancing.example import finished
from tests.training.run_files import weights

KEYS = registered()


def candidates_of(tokens_BS, layer=0, E=8) -> Candidates:
    logits_NE = torch.zeros(tokens_BS.numel(), E)
    return Candidates(layer, tokens_BS, logits_NE, logits_NE, 2)


def test_hash_routing_is_a_function_of_token_id_layer_and_seed():
    tokens_BS = torch.randint(100, (4, 200), generator=torch.Generator().manual_seed(0))
    scores_NE = HashRouting(0).choice_scores(candidates_of(tokens_BS))
    by_id = {token: scores_NE[i] for i, token in enumerate(tokens_BS.flatten().tolist())}
    assert all(torch.equal(by_id[token], scores_NE[i]) for i, token in enumerate(tokens_BS.flatten().tolist()))
    assert not torch.equal(scores_NE, HashRouting(1).choice_scores(candidates_of(tokens_BS)))
    assert not torch.equal(scores_NE, HashRouting(0).choice_scores(candidates_of(tokens_BS, layer=1)))


def chosen(strategy, tokens, layer=0, E=4, K=2) -> list[set[int]]:
    logits_NE = torch.zeros(len(tokens), E)
    scores_NE = strategy.choice_scores(Candidates(layer, torch.tensor([tokens]), logits_NE, logits_NE, K))
    return [{*row} for row in topk_indices(scores_NE, K).tolist()]


def test_round_robin_gives_each_token_id_the_next_experts():
    assert chosen(HashRouting(table="round_robin"), [0, 1, 2, 3], E=5) == [{0, 1}, {2, 3}, {4, 0}, {1, 2}]


def test_a_balanced_table_gives_the_most_frequent_ids_first_to_the_experts_with_the_least_load():
    """By hand: 8 -> 2, 0 (load 8 each); 5 -> 1, 3; 4 -> 1, 3 (9); 3 -> 2, 0 (11); the unseen id counts as 1."""
    counts_V, ids_V = torch.tensor([5, 3, 1, 8, 4]), torch.tensor([3, 0, 4, 1, 2])
    table_VK = balanced_table(counts_V, ids_V, torch.tensor([2, 0, 1, 3]), 2)
    assert [{*row} for row in table_VK.tolist()] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}, {1, 3}]


def test_balanced_tables_even_the_load_and_depend_on_layer_and_seed():
    counts_V = (3000 / torch.arange(1, 301)).long()  # as frequent as words
    counts_V[7] = 0
    routing = HashRouting(table="balanced", token_counts=lambda: counts_V)
    tables = {}
    for key, strategy, layer in [
        (0, routing, 0),
        (1, routing, 1),
        (2, HashRouting(1, "balanced", token_counts=lambda: counts_V), 0),
    ]:
        tables[key] = chosen(strategy, [*range(300)], layer, E=8)
        load = [
            sum(count for count, experts in zip(counts_V.tolist(), tables[key], strict=True) if e in experts)
            for e in range(8)
        ]
        assert max(load) < 1.02 * min(load) + 1
    assert tables[0] != tables[1] != tables[2] != tables[0]
    with pytest.raises(UserError, match="needs token_counts"):
        chosen(HashRouting(table="balanced"), [0])


def test_a_table_is_read_from_a_file_for_all_layers_or_for_each(tmp_path):
    file = str(tmp_path / "experts.npy")
    np.save(file, np.array([[0, 1], [3, 2]]))
    assert chosen(HashRouting(table="file", file=file), [1, 0, 1], layer=5) == [{2, 3}, {0, 1}, {2, 3}]
    np.save(file, np.array([[[0, 1]], [[3, 2]]]))
    assert [chosen(HashRouting(table="file", file=file), [0], layer) for layer in (0, 1)] == [[{0, 1}], [{2, 3}]]
    for experts, message in [
        ([[0, 4]], "2 different experts from 0 to 3"), ([[1, 1]], "2 different"), ([[0]], "2 different"),
        ([[[0, 1]], [[0, 1]]], "experts for 2 layers"), ([0.5], "whole numbers"),
    ]:  # fmt: skip
        np.save(file, np.array(experts))
        with pytest.raises(UserError, match=message):
            HashRouting(table="file", file=file).prepare(
                [Router(8, 4, 2, "softmax", True, layer) for layer in range(3)]
            )
    with pytest.raises(UserError, match="cannot be read"):
        HashRouting(table="file", file=str(tmp_path / "missing.npy"))
    with pytest.raises(UserError, match="must be set with table=file"):
        HashRouting(file=file)


def test_a_checkpoint_holds_the_table_of_a_file_that_may_change_later(tmp_path):
    file = str(tmp_path / "experts.npy")
    np.save(file, np.array([[0, 1], [3, 2]]))
    saved = HashRouting(table="file", file=file).state_dict()
    np.save(file, np.array([[1, 2], [0, 1]]))
    strategy = HashRouting(table="file", file=file, vocab_size=2)
    strategy.load_state_dict(saved)
    assert chosen(strategy, [0, 1]) == [{0, 1}, {2, 3}]
    with pytest.raises(UserError, match="file has experts for 2 token ids, fewer than 3"):
        HashRouting(table="file", file=file, vocab_size=3).prepare([Router(8, 4, 2, "softmax", True, layer=0)])


def test_equal_weights_do_not_depend_on_the_router_and_learned_ones_do():
    x_ND, tokens_BS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6).view(1, 6)
    router = Router(8, 4, 2, "sigmoid", renormalize=True, layer=0)
    init_router(router.weight_ED, "normal", 1.0, torch.Generator().manual_seed(0))
    learned, equal = (
        router(x_ND, tokens_BS, Composition({"hash": HashRouting(weights=weights)}, {}))
        for weights in ("learned", "equal")
    )
    assert torch.equal(learned.topk_experts_NK, equal.topk_experts_NK)
    assert torch.equal(equal.topk_probs_NK, torch.full((6, 2), 0.5))
    assert (learned.topk_probs_NK != 0.5).all()
    normed = {"logit_norm": LogitNorm()}
    Composition({"hash": HashRouting()} | normed, {})
    with pytest.raises(UserError, match="both adjust"):
        Composition({"hash": HashRouting(weights="equal")} | normed, {})


def test_uniform_routing_samples_anew_at_each_step_and_position_and_spreads_evenly():
    tokens_BS = torch.zeros(1, 4000, dtype=torch.int64)  # always the same id
    strategy = UniformRouting(0)
    first = strategy.choice_scores(candidates_of(tokens_BS))
    assert torch.equal(first, strategy.choice_scores(candidates_of(tokens_BS)))
    strategy.update(finished(torch.zeros(1, 8)))
    second = strategy.choice_scores(candidates_of(tokens_BS))
    even = 4000 * 2 / 8
    for scores_NE in (first, second):
        counts_E = torch.bincount(scores_NE.topk(2).indices.flatten(), minlength=8)
        assert ((counts_E - even) / (even * 6 / 8) ** 0.5).abs().max() < 4.5  # standard deviations
    overlap = (first.topk(2).indices[:, :, None] == second.topk(2).indices[:, None]).any(2).double().mean()
    assert overlap.item() == pytest.approx(2 / 8, abs=0.03)


def test_uniform_routing_depends_on_all_earlier_tokens_of_the_sequence():
    strategy, tokens_BS = UniformRouting(0), torch.tensor([[1, 5, 5], [2, 5, 5], [1, 5, 6]])
    scores_BSE = strategy.choice_scores(candidates_of(tokens_BS)).view(3, 3, -1)
    assert torch.equal(scores_BSE[0, :2], scores_BSE[2, :2])
    assert (scores_BSE[0, 1:] != scores_BSE[1, 1:]).all()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_the_hash_is_splitmix64(number, seed):
    def reference(z: int) -> int:
        mask = 2**64 - 1
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert splitmix64(torch.tensor(number)).item() % 2**64 == reference(number % 2**64)
    numbers_NE = uniform_numbers(torch.tensor([number]), 5, seed, layer=3)
    assert ((numbers_NE >= 0) & (numbers_NE < 1)).all()
    assert len(set(numbers_NE.flatten().tolist())) == 5


def together(*names: str):
    return build_balancing({name: KEYS[name] for name in names}, FACTS, 100, "sum")


def initial_model(spec, init: str) -> Transformer:
    model = Transformer(transformer_shape(spec, 0))
    initialize(model, spec.config.seed, spec.config.model.init_std, init)
    return model


@pytest.mark.parametrize(
    ("keys", "init"), [(("balancing=frozen", "router.init=normal"), "normal"), (("balancing=lf_frozen",), "orthogonal")]
)
def test_a_frozen_router_keeps_its_initialization_and_everything_else_trains(small_spec, keys, init):
    spec = small_spec(*keys, "optim.weight_decay=1", "trainer.max_steps=3", "trainer.val_every=3")
    train(spec)
    start, end = initial_model(spec, init), weights(spec)
    for name, parameter in start.named_parameters():
        assert torch.equal(parameter, end[f"model.{name}"]) == ("router" in name), name
    assert keys[0] == "balancing=frozen" or end["balancing.strategies.lf.bias_LE"].any()


@pytest.mark.parametrize("init", ["orthogonal", "normal"])
def test_a_mixture_keeps_its_initial_weight_and_its_basis_is_the_polar_factor(init):
    router = Router(16, 6, 2, "softmax", renormalize=True, layer=0)
    init_router(router.weight_ED, init, 0.3, torch.Generator().manual_seed(1))
    before_ED = router.weight_ED.detach().clone()
    OrthogonalMixture().prepare([router])
    unitary_ED, positive_EE = polar(before_ED.double().numpy(), side="left")
    computed = router.parametrizations.weight_ED
    torch.testing.assert_close(computed[0].basis_ED, torch.from_numpy(unitary_ED).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(computed.original, torch.from_numpy(positive_EE).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(router.weight_ED, before_ED)


@pytest.mark.parametrize("decay_router", [True, False])
def test_weight_decay_acts_on_mixtures_like_on_routers_and_never_on_householder_vectors_or_frozen_weights(decay_router):
    expected = {"ortho_mix": decay_router, "none": decay_router, "ortho_param": False, "frozen": False}
    for name, decays in expected.items():
        module = composed_module(together(name))
        decayed, _ = parameter_groups(module.model, module.optim.model_copy(update={"decay_router": decay_router}))
        of_routers = {id(p) for router in module.model.routers for p in router.parameters()}
        assert bool(of_routers & {id(p) for p in decayed["params"]}) == decays, name

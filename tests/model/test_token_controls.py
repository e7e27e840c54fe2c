"""Controls for hash routing: a router that reads the token's embedding, and a learned vector per token id."""

from dataclasses import replace

import pytest
import torch

from simbal.analysis.pruning import Pruning, pruned
from simbal.conformance import V, batch_of, tiny_model
from simbal.cost import parameters
from simbal.model.attention import KeyValueCache, rotary_angles
from simbal.model.init import initialize
from simbal.model.transformer import Transformer
from simbal.training.optimizer import parameter_groups
from simbal.training.run import train
from tests.training.run_files import weights

TOKENS_BS = batch_of(0)[:, :-1]


def tiny(activation_checkpointing=False, **changes) -> Transformer:
    model = Transformer(replace(tiny_model().shape, **changes), "reference", activation_checkpointing)
    initialize(model, seed=0, std=0.3, router_init="normal")
    return model


def filled(**changes) -> Transformer:
    """Return a model whose token tables are random."""
    model = tiny(token_table=True, **changes)
    for block in model.blocks:
        torch.nn.init.normal_(block.token_table.weight, generator=torch.Generator().manual_seed(1))
    return model


def test_with_embedding_input_the_logits_are_a_function_of_the_token_id_alone():
    model = tiny(router_input="embedding")
    torch.nn.init.normal_(model.blocks[1].feed_forward_norm.weight, 1.0, 0.3)
    _, routings = model(TOKENS_BS)
    table_VD = model.embedding.weight / (model.embedding.weight.square().mean(1, keepdim=True) + 1e-5).sqrt()
    for block, routing in zip(model.blocks, routings, strict=True):
        logits_VE = (table_VD * block.feed_forward_norm.weight) @ block.feed_forward.router.weight_ED.T
        torch.testing.assert_close(routing.logits_NE, logits_VE[TOKENS_BS.flatten()])


def test_the_experts_still_read_hidden_states_and_initial_weights_are_unchanged():
    plain, model = tiny(), tiny(router_input="embedding")
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    seen = {}
    for each in (plain, model):
        each.blocks[0].feed_forward.register_forward_pre_hook(lambda layer, args: seen.update({layer: args[0]}))
        each(TOKENS_BS)
    assert torch.equal(*seen.values())


def test_embedding_routers_and_tables_train_prune_and_generate_as_in_one_pass():
    model, recomputed = (filled(router_input="embedding", activation_checkpointing=flag) for flag in (False, True))
    for each in (model, recomputed):
        each(TOKENS_BS)[0].square().sum().backward()
    for mine, other in zip(model.parameters(), recomputed.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)  # the head is not used
        assert mine.grad is None or (mine.grad.any() and torch.equal(mine.grad, other.grad))
    full_BSD = model(TOKENS_BS)[0]
    with torch.no_grad(), pruned(model.feed_forwards, Pruning(0.0, "absolute", False, False)):
        torch.testing.assert_close(model(TOKENS_BS)[0], full_BSD)
    cache = KeyValueCache(2)
    pieces = [model(piece, None, cache)[0] for piece in TOKENS_BS.split([5, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full_BSD)


def test_a_block_adds_the_vector_of_the_token_id_to_its_output():
    block, plain = filled().blocks[0], tiny().blocks[0]
    x_BSD, rotation_2SP = torch.randn(4, 8, 16), rotary_angles(8, 8, 1e4, torch.device("cpu"))
    with_table, without = (each(x_BSD, rotation_2SP, None, TOKENS_BS, None, None)[0] for each in (block, plain))
    torch.testing.assert_close(with_table - without, block.token_table.weight[TOKENS_BS])


def test_a_token_table_starts_at_zero_and_changes_no_other_initial_weight(small_spec):
    plain, model = tiny(), tiny(token_table=True)
    named = dict(model.named_parameters())
    assert all(torch.equal(named.pop(name), parameter) for name, parameter in plain.named_parameters())
    assert named.keys() == {"blocks.0.token_table.weight", "blocks.1.token_table.weight"}
    assert torch.equal(model(TOKENS_BS)[0], plain(TOKENS_BS)[0])
    decayed, _ = parameter_groups(model, small_spec().config.optim)
    assert {id(table) for table in named.values()} < {id(parameter) for parameter in decayed["params"]}


@pytest.mark.parametrize("keys", [("optim=muon",), ("optim.mup=true", "optim.mup_base_width=4")])
def test_a_token_table_is_trained_like_the_embedding(small_spec, keys):
    model = tiny(token_table=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{names[p] for p in group["params"]} for group in parameter_groups(model, small_spec(*keys).config.optim)]
    (of_embedding,) = (group for group in groups if "embedding.weight" in group)
    assert {"blocks.0.token_table.weight", "blocks.1.token_table.weight"} < of_embedding


def test_a_token_uses_one_row_of_each_table_and_no_product():
    shape = tiny_model().shape
    plain, counted = parameters(shape), parameters(replace(shape, token_table=True))
    assert counted.total - plain.total == 2 * V * 16
    assert counted.active - plain.active == 2 * 16
    for name in ("without_embedding", "matrices", "every_expert"):
        assert getattr(counted, name) == getattr(plain, name)


def test_a_run_trains_with_every_new_option(small_spec):
    keys = ("router=sqrtsoftplus", "router.scale=1.5", "router.input=embedding", "model.token_table=true")
    spec = small_spec("balancing=[lf,lbl]", *keys, "trainer.max_steps=2", "trainer.val_every=2")
    train(spec)
    tables = [table for name, table in weights(spec).items() if "token_table" in name]
    assert len(tables) == spec.config.model.num_layers
    assert all(table.any() for table in tables)

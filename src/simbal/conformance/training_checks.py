"""What every strategy promises of its part in training a whole model.

Each promise is a function that raises AssertionError if it is broken.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from simbal.conformance.case import SIZES, Case
from simbal.conformance.loss_checks import losses
from simbal.conformance.tiny_training import batch_of, module_of, outcome, recompute, same, state, tiny_module, train
from simbal.data.loader import HeldOut

E = SIZES["num_experts"]
RELABELLED = torch.tensor([3, 0, 5, 1, 4, 2])


def its_loss_is_part_of_the_training_loss(case: Case) -> None:
    """Check that a training step adds its loss, as declared over layers."""
    strategy = case.make()
    module, window_BT = module_of(strategy, case.gating), batch_of(0)
    _, routings = module.model(window_BT[:, :-1], module.balancing)
    declared_L = losses(strategy, routings)
    step = module.training_step(window_BT, 0)
    torch.testing.assert_close(
        step["loss"] - step["ce"], declared_L.mean() if strategy.over_layers == "mean" else declared_L.sum(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def the_cut_into_micro_batches_matters_only_if_declared(case: Case) -> None:
    """Check that four micro-batches train as one does, unless its scope is micro."""
    whole, cut = tiny_module(case), tiny_module(case)
    train(whole, range(2))
    train(cut, range(2), micro_batches=4)
    assert same(outcome(whole), outcome(cut)) != (case.make().properties.scope == "micro")


def activation_checkpointing_changes_nothing(case: Case) -> None:
    """Check that computing activations twice trains to the same bits."""
    plain, recomputed = tiny_module(case), tiny_module(case)
    recompute(recomputed)
    for module in (plain, recomputed):
        train(module, range(2), micro_batches=2)
    assert same(outcome(plain), outcome(recomputed), exactly=True)


def evaluation_has_no_effect(case: Case) -> None:
    """Check that validation changes no state, and that its coefficient changes no validation."""
    strategy = case.make()
    module = module_of(strategy, case.gating)
    train(module, range(2))
    module.eval()
    before, losses_seen, window_BT = state(module), [], batch_of(7)
    for strategy.coef in (0.0, 10.0):
        module.on_validation_epoch_start()
        module.validation_step(HeldOut(window_BT, torch.zeros_like(window_BT[:, 1:])), 0)
        losses_seen.append(module.totals.nats)
    assert same(before, state(module), exactly=True)
    assert losses_seen[0] == losses_seen[1]


def its_state_survives_a_checkpoint(case: Case) -> None:
    """Check that training goes on from a saved state to the same bits."""
    module, restored = tiny_module(case), tiny_module(case)
    train(module, range(2))
    restored.load_state_dict(module.state_dict())
    for each in (module, restored):
        train(each, range(2, 3))
    assert same(outcome(module), outcome(restored), exactly=True)


def its_state_stays_fp32(case: Case) -> None:
    """Check that a cast of the model to bf16 leaves its state as it is."""
    module = tiny_module(case)
    train(module, range(2))
    before = state(module)
    module.bfloat16()
    assert {tensor.dtype for tensor in state(module).values()} <= {torch.float32, torch.int64}
    assert same(before, state(module), exactly=True)


def instances_share_nothing(case: Case) -> None:
    """Check that two strategies that train in turns do not see each other."""
    alone, first, second = (tiny_module(case) for _ in range(3))
    train(alone, range(2))
    for step in range(2):
        train(first, range(step, step + 1))
        train(second, range(step + 3, step + 4))
    assert same(outcome(alone), outcome(first), exactly=True)


def choices_look_ahead_only_if_declared(case: Case) -> None:
    """Check whether the last token changes the experts of those before it."""
    module = tiny_module(case)
    train(module, range(2))
    tokens_BS = batch_of(5)[:, :-1]
    changed_BS = tokens_BS.clone()
    changed_BS[-1, -1] = (changed_BS[-1, -1] + 1) % 32
    with torch.no_grad():
        pairs = zip(*(module.model(ids_BS, module.balancing)[1] for ids_BS in (tokens_BS, changed_BS)), strict=True)
        blind = all(torch.equal(a.topk_experts_NK[:-1], b.topk_experts_NK[:-1]) for a, b in pairs)
    assert blind == case.make().properties.causal


def relabelling_experts_relabels_the_choice_if_declared(case: Case) -> None:
    """Check whether experts in another order are chosen and weighed in that order."""
    order, plain, relabelled = RELABELLED, tiny_module(case), tiny_module(case)
    for module in (plain, relabelled):
        train(module, range(1))
    with torch.no_grad():
        layers: Iterable[Any] = relabelled.model.feed_forwards
        for layer in layers:
            for experts in (layer.w13_E2FD, layer.w2_EFD):
                experts.copy_(experts[order])
            relabelled_ED = layer.router.weight_ED[order]
            if "weight_ED" in dict(layer.router.named_parameters()):
                layer.router.weight_ED.copy_(relabelled_ED)
            else:
                layer.router.weight_ED = relabelled_ED  # parametrised: computed back into its parameter
    relabelled.balancing.load_state_dict(
        {name: tensor[..., order] if tensor.shape[-1:] == (E,) else tensor for name, tensor in state(plain).items()}
    )
    steps = [train(module, range(1, 2))[0] for module in (plain, relabelled)]
    terms = [[part for name, part in step.losses[0].items() if name.startswith("aux/")] for step in steps]
    first, second = (sum(parts, torch.tensor(0.0)) for parts in terms)
    plain_LE, relabelled_LE = (step.counts_LE for step in steps)
    assert plain_LE is not None
    assert relabelled_LE is not None
    counts = torch.equal(plain_LE[:, order], relabelled_LE)
    assert (counts and torch.allclose(first, second, rtol=1e-4)) == case.make().properties.equivariant


CHECKS: list[Callable[[Case], None]] = [
    its_loss_is_part_of_the_training_loss,
    the_cut_into_micro_batches_matters_only_if_declared,
    activation_checkpointing_changes_nothing,
    evaluation_has_no_effect,
    its_state_survives_a_checkpoint,
    its_state_stays_fp32,
    instances_share_nothing,
    choices_look_ahead_only_if_declared,
    relabelling_experts_relabels_the_choice_if_declared,
]

"""The doctor: what a Hugging Face MoE does about balance in fact, and what to do about it.

Nothing is believed by the name of a class or the key of a config: the model is run on random tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from simbal.host.findings import Finding, OwnLoss
from simbal.host.hooks import paused
from simbal.host.own_loss import Subject, undisturbed
from simbal.host.rules import Rule


@dataclass(frozen=True)
class Description:
    """What a model's own code does about balance; printed, a list of findings."""

    model: str  # the name of its class
    routers: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.routers}"]
        for finding in self.findings:
            lines += [f"- {finding.fact}"] + ([f"  -> {finding.advice}"] if finding.advice else [])
        return "\n".join(lines)

    def __getitem__(self, kind: str) -> Finding:
        return next(finding for finding in self.findings if finding.kind == kind)

    def __contains__(self, kind: object) -> bool:
        return any(finding.kind == kind for finding in self.findings)


def describe(model: nn.Module) -> Description:
    """Run a model of transformers on random tokens, and say what its own code does about balance.

        print(describe(model))

    It takes a few passes over at most 48 tokens, with gradients of the routers and the input embedding alone. The model
    and the random numbers of the process are left as they were; attached strategies are passed by meanwhile.

    Args:
        model: a language model with routers that `attach` knows.

    Raises:
        UserError: it has none, or returns no loss, or its weights are not all in memory.
    """
    subject = Subject(model)
    routers, rule = subject.routers, subject.routers[0].rule
    frozen = not any(router.weight_ED.requires_grad for router in routers)
    biases = [router.bias for router in routers if router.bias is not None and router.bias.requires_grad]
    with paused(routers), undisturbed(model, [subject.embedding, *(router.weight_ED for router in routers), *biases]):
        findings = [*OwnLoss(subject).findings(), *bias_findings(subject)]
    if frozen:
        findings.append(Finding("frozen", "the weights of all routers are frozen", "set their requires_grad to train"))
    facts = f"{len(routers)} routers, {routers[0].top_k} of {len(routers[0].weight_ED)} experts per token; {said(rule)}"
    return Description(type(model).__name__, facts, tuple(findings))


def said(rule: Rule) -> str:
    """Return the rule of a router in words."""
    groups = rule.groups
    parts = (
        rule.gating,
        "with a bias on the choice" if rule.biased else "",
        f"from the best {groups.chosen} of {groups.count} groups" if groups else "",
        "drawn at random in training" if rule.draws_in_training else "",
        "weights divided by their sum" if rule.renormalize else "",
        f"weights x {rule.scale:g}" if rule.scale != 1 else "",
    )
    return ", ".join(part for part in parts if part)


def bias_findings(subject: Subject) -> Iterator[Finding]:
    """Yield whether a bias on the choice is moved by training, found by a forward and a backward pass."""
    biases = {router.name: router.bias_E for router in subject.routers}
    held = {name: bias_E for name, bias_E in biases.items() if bias_E is not None}
    if not held:
        return
    before = {name: bias_E.detach().clone() for name, bias_E in held.items()}
    subject.loss(subject.batch(0, 2, 32)).backward()
    moved = [name for name, bias_E in held.items() if not torch.equal(bias_E, before[name])]
    learning = [router.name for router in subject.routers if router.bias is not None and router.bias.grad is not None]
    if moved or learning:
        yield Finding("moving_bias", f"training moves the bias on the choice of experts of {[*moved, *learning][0]}")
        return
    size = f"in {len(held)} layers, at most {max(float(bias_E.abs().max()) for bias_E in before.values()):.3g} now"
    yield Finding(
        "idle_bias", f"its bias on the choice of experts ({size}) is moved by nothing: no forward pass changes it, and "
        "no gradient reaches it", "attach(model, LossFree(bias_on='scores')) moves it",
    )  # fmt: skip

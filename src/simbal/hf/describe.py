"""Describe how the code of a Hugging Face MoE balances the load of its experts, and what users can change.

Class names and config keys are unreliable. Instead, the model runs on random tokens, and the loss that its code adds is
compared with known forms of the load-balancing loss.

Shapes: B sequences, S sequence length, N = B*S tokens, P passes, E experts, K experts per token.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simbal.balancing.base import Balancing
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss
from simbal.errors import UserError
from simbal.hf.hooks import ForwardPass, Hooks, paused
from simbal.hf.routers import Rule, find_backbone, find_routers
from simbal.model.router import Routing, apply_gating

S = 16
SWITCH = "output_router_logits"  # config key and forward argument that enables transformers' auxiliary loss
COEFFICIENT = "router_aux_loss_coef"  # attribute of the model, and config key
FORMS: dict[str, Balancing] = {  # load-balancing losses by the tokens over which they are computed
    "over the tokens of all layers together": PooledLoadBalancingLoss(1.0),
    "for each layer, averaged over layers": LoadBalancingLoss(1.0, scope="micro"),
    "for each sequence in each layer, averaged": LoadBalancingLoss(1.0, scope="sequence"),
}
ATTACH_LBL = "attach(model, LoadBalancingLoss(scope='micro'))"


@dataclass(frozen=True)
class Finding:
    """A fact about a model, with advice. `kind` is a short name for programs."""

    kind: str
    fact: str
    advice: str = ""


@dataclass(frozen=True)
class Description:
    """How a model's own code balances load. Print it for a list of findings."""

    model: str  # name of the class
    routers: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.routers}"]
        for finding in self.findings:
            lines += [f"- {finding.fact}"] + ([f"  -> {finding.advice}"] if finding.advice else [])
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """Run a transformers model on random tokens and report how its own code balances load.

        print(describe(model))

    It takes a few passes over at most 48 tokens, with gradients for the routers and the input embedding. The model and
    the random number generators are restored, and attached strategies are ignored.

    Args:
        model: a language model with routers that `attach` knows.

    Raises:
        UserError: the model has no such routers, returns no loss, or some weights are not in memory.
    """
    experiment = Experiment(model)
    routers = experiment.routers
    is_frozen = not any(router.weight_ED.requires_grad for router in routers)
    biases = [router.bias for router in routers if router.bias is not None and router.bias.requires_grad]
    trained = [experiment.embedding, *(router.weight_ED for router in routers), *biases]
    with paused(routers), restored(model, trained):
        findings = [*experiment.loss_findings(), *experiment.bias_findings()]
    if is_frozen:
        findings.append(Finding("frozen", "all router weights are frozen", "set requires_grad to train them"))
    facts = f"{len(routers)} routers, {routers[0].top_k} of {len(routers[0].weight_ED)} experts per token; "
    return Description(type(model).__name__, facts + describe_rule(routers[0].rule), tuple(findings))


def describe_rule(rule: Rule) -> str:
    """Return the rule of a router in words."""
    groups = rule.groups
    parts = (
        rule.gating,
        "with a bias on the choice" if rule.biased else "",
        f"from the best {groups.chosen} of {groups.count} groups" if groups else "",
        "sampled in training" if rule.samples_in_training else "",
        "weights divided by their sum" if rule.renormalize else "",
        f"weights x {rule.scale:g}" if rule.scale != 1 else "",
    )
    return ", ".join(part for part in parts if part)


@contextmanager
def restored(model: nn.Module, trained: Sequence[Tensor]) -> Iterator[None]:
    """Put `model` into training mode within the block, with gradients for `trained` only; restore everything after."""
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]  # some models update a bias in training
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(gpus), torch.enable_grad():
        try:
            for parameter, _, _ in parameters:
                parameter.grad = None
                parameter.requires_grad_(any(parameter is tensor for tensor in trained))
            model.train()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, requires_grad, gradient in parameters:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


@contextmanager
def attribute_set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the block. If `owner` is None, do nothing."""
    if owner is None:
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@torch.no_grad()
def load_balancing_loss(form: Balancing, routings: Sequence[Routing], twice: bool = False) -> float:
    """Return E sum_i f_i P_i: f counts the K largest logits, P is a mean softmax, `form` is a value of `FORMS`.

    With `twice`, P is the mean softmax of the softmax.
    """
    probs = [apply_gating(r.logits_NE, "softmax") for r in routings]
    probs = [probs_NE.softmax(-1) for probs_NE in probs] if twice else probs
    pairs = zip(routings, probs, strict=True)
    return float(form.losses([replace(r, gating="softmax", probs_NE=probs_NE) for r, probs_NE in pairs], None).mean())


class Experiment:
    """A transformers model that is run on random tokens to find out what its auxiliary loss does."""

    def __init__(self, model: nn.Module) -> None:
        """Find the routers.

        Raises:
            UserError: see `find_routers`; or some weights are not in memory.
        """
        self.model, self.routers = model, find_routers(model)
        self.backbone = find_backbone(model, self.routers)
        self.embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
        if any(parameter.is_meta or isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise UserError(f"some weights of {type(model).__name__} are offloaded or sharded: they get no gradients")
        self.tolerance = 0.03 if torch.finfo(self.embedding.dtype).bits < 32 else 2e-3  # relative

    def batch(self, seed: int, sequences: int, distinct: int) -> dict[str, Tensor]:
        """Return random token ids, (B, S), with `distinct` different values; all tokens are labels."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = torch.randint(1, len(self.embedding), (distinct,), generator=generator)
        tokens_BS = vocabulary[torch.randint(distinct, (sequences, S), generator=generator)].to(self.embedding.device)
        return {"input_ids": tokens_BS, "labels": tokens_BS, "attention_mask": torch.ones_like(tokens_BS)}

    def run(self, batch: dict[str, Tensor], **keys: object) -> Any:
        """Return the model's output for a batch, with its loss."""
        torch.manual_seed(0)
        output = self.model(**batch, use_cache=False, **keys)
        if getattr(output, "loss", None) is None:
            raise UserError(f"{type(self.model).__name__} returns no loss for labels: pass a language model")
        return output

    def observe(self, batch: dict[str, Tensor], turned_on: bool = True) -> tuple[Tensor, ForwardPass]:
        """Return the loss that the model adds to the cross-entropy of a batch, a scalar with gradient, and the pass.

        The auxiliary loss is `turned_on`, or as the config says.
        """
        hooks = Hooks(self.backbone, self.routers)
        try:
            output = self.run(batch, **{SWITCH: True} if turned_on else {})
        finally:
            hooks.remove()
        logits_NV, labels_N = output.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
        assert hooks.finished
        return output.loss - nn.functional.cross_entropy(logits_NV, labels_N), hooks.finished[0]

    def added(self, turned_on: bool = True) -> Tensor:
        """Return the loss that the model adds to the cross-entropy of a fixed batch, a scalar with gradient."""
        return self.observe(self.batch(7, 2, 5), turned_on)[0]

    def differ(self, one: float, other: float) -> bool:
        """Whether two values differ by more than the rounding error of the cross-entropy."""
        return abs(one - other) > 1e-4 + self.tolerance / 10 * max(abs(one), abs(other))

    def scales_loss(self, owner: Any) -> bool:
        """Whether the auxiliary loss depends on the coefficient stored in `owner`."""
        before = self.added().item()
        with attribute_set_to(owner, COEFFICIENT, getattr(owner, COEFFICIENT) + 1.0):
            return self.differ(self.added().item(), before)

    def loss_findings(self) -> Iterator[Finding]:
        """Yield all findings about the auxiliary loss."""
        owners = [module for module in self.model.modules() if COEFFICIENT in vars(module)]
        owner = next((module for module in owners if self.scales_loss(module)), None)
        if owner is None and not self.differ(self.added().item(), 0.0):
            advice = f"{ATTACH_LBL} adds one for each layer"
            yield Finding("no_loss", "its code has no auxiliary loss, whatever the config says", advice)
            return
        yield from self.switch_findings(owner)
        with attribute_set_to(owner, COEFFICIENT, 1.0):
            yield from self.formula_findings("" if owner is None else f"model.{COEFFICIENT} x ")
            yield self.gradient_finding()
        if self.divides_by_items():
            yield Finding(
                "accumulation",
                "num_items_in_batch, which the Trainer passes, divides the cross-entropy but not this loss: with G "
                "micro-batches per step on R ranks it is G x R times as strong (huggingface/transformers issue 48690)",
                "divide its coefficient by gradient_accumulation_steps and the number of ranks, or use attach_trainer, "
                "which averages losses",
            )  # fmt: skip
        config = getattr(self.model, "config", None)
        text_config = config.get_text_config() if config is not None else None
        if hasattr(text_config, SWITCH) and (coefficient := getattr(text_config, COEFFICIENT, 0)):
            yield Finding(
                "trl", f"trl 1.16's trainers (SFT, DPO, KTO, GRPO, RLOO) add it with config.{COEFFICIENT} = "
                f"{coefficient:g}, whatever config.{SWITCH} says",
                f"pass {COEFFICIENT}=0.0 to the trainer's config, such as SFTConfig, to turn it off",
            )  # fmt: skip
        if owner is not None and hasattr(config, COEFFICIENT) and not self.scales_loss(config):
            yield Finding(
                "config_ignored", f"config.{COEFFICIENT} is only read when the model is created",
                f"change model.{COEFFICIENT} instead, or pass the key to from_pretrained",
            )  # fmt: skip

    def switch_findings(self, owner: nn.Module | None) -> Iterator[Finding]:
        """Yield whether the auxiliary loss is on; `owner` is the module with its coefficient."""
        coefficient = getattr(owner, COEFFICIENT, None)
        setting = "a coefficient in its code" if owner is None else f"model.{COEFFICIENT} = {coefficient:g}"
        if coefficient == 0:
            fact = f"its auxiliary loss has no effect: model.{COEFFICIENT} is 0"
            yield Finding("zero", fact, f"set model.{COEFFICIENT} to train with it")
        with attribute_set_to(owner, COEFFICIENT, 1.0):
            is_on = self.differ(self.added(turned_on=False).item(), 0.0)
        if not is_on:
            yield Finding(
                "off", f"its auxiliary loss is off: config.{SWITCH} is False, so {setting} has no effect",
                f"set model.config.{SWITCH} = True, or attach a loss, which needs no setting",
            )  # fmt: skip
        elif coefficient != 0:
            yield Finding("on", f"its auxiliary loss is on, with {setting}")

    def find_form(self) -> tuple[str, float, bool] | None:
        """Return the text in `FORMS`, the factor and whether softmax is applied twice in the added loss, or None."""
        sizes = ((1, 1), (2, 3), (2, 32), (3, 6), (1, 16))  # with different degrees of imbalance
        passes = [self.observe(self.batch(seed, *size)) for seed, size in enumerate(sizes)]
        routings = [seen.routings(self.routers) for _, seen in passes]
        added_P = torch.tensor([added.item() for added, _ in passes], dtype=torch.float64)
        for twice, (text, form) in product((False, True), FORMS.items()):
            loss_P = torch.tensor([load_balancing_loss(form, each, twice) for each in routings], dtype=torch.float64)
            factor = float((loss_P @ added_P) / (loss_P @ loss_P))
            if bool(((factor * loss_P - added_P).abs() <= self.tolerance * added_P.abs()).all()):
                return text, factor, twice
        return None

    def formula_findings(self, coefficient: str) -> Iterator[Finding]:
        """Yield the formula of the loss. `coefficient` is the text before the formula; its value must be 1."""
        found, top_k, gating = self.find_form(), self.routers[0].top_k, self.routers[0].gating
        if found is None:
            yield Finding("unknown", "its auxiliary loss is not a known form of the load-balancing loss")
            return
        text, factor, twice = found
        is_one = abs(factor - 1) < self.tolerance
        formula = f"{coefficient}{'' if is_one else f'{factor:.4g} x '}E sum_i f_i P_i {text}"
        yield Finding(
            "formula", f"it is {formula}; f_i: fraction of tokens with expert i among the {top_k} largest logits, P_i: "
            f"mean softmax of {'the softmax of ' if twice else ''}the logits",
        )  # fmt: skip
        if twice:
            yield Finding(
                "double_softmax", "it applies softmax twice, which flattens P_i toward 1/E and weakens the loss "
                "(huggingface/transformers issue 45120)", f"upgrade transformers, or use {ATTACH_LBL}",
            )  # fmt: skip
        if top_k > 1 and is_one:
            yield Finding(
                "factor_k", f"its f_i sum to K = {top_k}: under uniform load the loss is {top_k} instead of 1, and a "
                f"coefficient acts {top_k} times as strongly as with f_i that sum to 1",
                f"divide a coefficient by {top_k} if it was tuned with f_i that sum to 1 (norm='E/K')",
            )  # fmt: skip
        if isinstance(FORMS[text], PooledLoadBalancingLoss) and len(self.routers) > 1:
            yield Finding("pooled", "opposite imbalances of two layers cancel out", f"{ATTACH_LBL} balances each layer")
        if gating != "softmax":
            yield Finding("other_gating", f"its P_i use softmax, but the router uses {gating}")
        yield from self.padding_findings(FORMS[text], factor, twice)

    def padding_findings(self, form: Balancing, factor: float, twice: bool) -> Iterator[Finding]:
        """Yield whether padding counts as tokens."""
        padded = self.batch(3, 3, 9)
        for row, length in enumerate((16, 9, 4)):
            padded["attention_mask"][row, length:] = 0
        padded["labels"] = padded["labels"].masked_fill(padded["attention_mask"] == 0, -100)
        added, seen = self.observe(padded)
        with_padding = replace(seen, kept_N=None, lengths_B=None)
        passes = (each.routings(self.routers) for each in (seen, with_padding))
        losses = [factor * load_balancing_loss(form, each, twice) for each in passes]
        is_mask_used, is_padding_counted = (abs(added - loss) <= self.tolerance * abs(added) for loss in losses)
        if is_mask_used:
            yield Finding("mask", "padding is excluded if the forward pass gets an attention_mask")
        elif is_padding_counted:
            fact = "padding counts as tokens, although the forward pass gets an attention_mask"
            yield Finding("padding", fact, f"{ATTACH_LBL} excludes padding; or train without padding")

    def gradient_finding(self) -> Finding:
        """Return how many routers get a gradient from the loss."""
        weights = [router.weight_ED for router in self.routers]
        added = self.added()
        if added.requires_grad:
            added.backward()
        rounding = 1e-6  # of the cross-entropy's gradient
        reached = sum(weight.grad is not None and float(weight.grad.norm()) > rounding for weight in weights)
        if reached == len(weights):
            return Finding("gradient", f"its gradient reaches all {reached} routers")
        advice = "if gradient checkpointing drops the gradient, enable it with {'use_reentrant': False}"
        return Finding("no_gradient", f"its gradient reaches {reached} of {len(weights)} routers", advice)

    def divides_by_items(self) -> bool:
        """Whether the model divides its cross-entropy by the argument `num_items_in_batch`."""
        parameters = inspect.signature(self.model.forward).parameters.values()
        if not any(each.name == "num_items_in_batch" or each.kind is each.VAR_KEYWORD for each in parameters):
            return False
        one, many = (self.run(self.batch(0, 1, S), num_items_in_batch=torch.tensor(n)).loss for n in (1.0, 1e20))
        return bool(abs(one - many) > 1e-3 * abs(one))

    def bias_findings(self) -> Iterator[Finding]:
        """Yield whether a forward and a backward pass change the model's own bias on the choice of experts."""
        before = {r.name: r.bias_E.detach().clone() for r in self.routers if r.bias_E is not None}
        if not before:
            return
        self.run(self.batch(0, 2, 32)).loss.backward()
        for router in self.routers:
            bias = router.bias
            if bias is not None and (bias.grad is not None or not torch.equal(bias.view(-1), before[router.name])):
                yield Finding("moving_bias", f"training changes the bias on the choice of experts of {router.name}")
                return
        largest = max(float(bias_E.abs().max()) for bias_E in before.values())
        yield Finding(
            "idle_bias", f"nothing updates its bias on the choice of experts ({len(before)} layers, largest value "
            f"{largest:.3g}): neither the forward pass nor a gradient changes it",
            "attach(model, LossFree(bias_on='scores')) updates it",
        )  # fmt: skip

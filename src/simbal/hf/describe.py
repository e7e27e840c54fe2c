"""Reports what a Hugging Face MoE's own code does about balance, and what to do about it.

Names of classes and keys of configs are not believed: the model is run on random tokens, and the loss that its code
adds is compared with the known readings of the load balancing loss.

Shapes: B sequences, S sequence length, N = B*S tokens, P passes, E experts, K experts per token.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss
from simbal.errors import UserError
from simbal.hf.hooks import Hooks, paused
from simbal.hf.routers import HFRouter, Rule, find_backbone, find_routers
from simbal.model.router import Routing, apply_gating

HUGE = 1e20  # by so many labels the cross-entropy is divided, and only what is added to it is left
S = 16
SETTING = "output_router_logits"  # the argument, and the key of the config, by which transformers adds the loss
TOGETHER = {
    "all layers": "over the tokens of all layers together",
    "each layer": "of each layer, averaged over layers",
    "each sequence": "of each sequence in each layer, averaged",
}
ATTACH = "attach(model, LoadBalancingLoss(scope='micro')) takes"


@dataclass(frozen=True)
class Finding:
    """A fact about a model, and what its user may do about it; `kind` is a short name for programs."""

    kind: str
    fact: str
    advice: str = ""


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


@dataclass(frozen=True)
class Observed:
    """A pass in training mode: what was added to the cross-entropy, and the decisions of every layer's router."""

    added: Tensor  # a scalar, with its gradient
    routings: list[Routing]  # of the tokens that the attention mask lets through
    all_routings: list[Routing]  # of all tokens


class Experiment:
    """A model of transformers that is run on random tokens, with its routers and its input embedding."""

    def __init__(self, model: nn.Module) -> None:
        """Find the routers.

        Raises:
            UserError: as `find_routers`; or the model is no whole language model.
        """
        self.model, self.routers = model, find_routers(model)
        self.backbone = find_backbone(model, self.routers)
        embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
        if not isinstance(embedding, nn.Module) or not hasattr(embedding, "weight"):
            raise UserError(f"{type(model).__name__} has no input embeddings: give a language model with its head")
        self.embedding: Tensor = embedding.weight  # type: ignore[assignment]
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError(f"the weights of {type(model).__name__} are not all in memory, and gradients are to flow")

    def batch(self, seed: int, sequences: int, distinct: int) -> dict[str, Tensor]:
        """Return B x S random token ids, of so many distinct ones, all of them labels."""
        draws = torch.Generator().manual_seed(seed)
        vocabulary = torch.randint(1, len(self.embedding), (distinct,), generator=draws)
        tokens_BS = vocabulary[torch.randint(distinct, (sequences, S), generator=draws)].to(self.embedding.device)
        return {"input_ids": tokens_BS, "labels": tokens_BS, "attention_mask": torch.ones_like(tokens_BS)}

    def batches(self) -> list[dict[str, Tensor]]:
        """Return batches whose tokens spread over the experts to very different degrees."""
        return [self.batch(seed, *sizes) for seed, sizes in enumerate(((1, 1), (2, 3), (2, 32), (3, 6), (1, 16)))]

    @cached_property
    def divides(self) -> bool:
        """Whether the model divides its cross-entropy by the number of labels that it is given."""
        taken = inspect.signature(self.model.forward).parameters.values()
        if not any(each.name == "num_items_in_batch" or each.kind is each.VAR_KEYWORD for each in taken):
            return False
        batch = self.batch(0, 1, S)
        one, many = (self.run(batch, num_items_in_batch=torch.tensor(n)).loss.detach() for n in (1.0, HUGE))
        return bool(abs(one - many) > 1e-3 * abs(one))

    def run(self, batch: dict[str, Tensor], **keys: object) -> Any:
        """Return the model's output for a batch, with its loss."""
        torch.manual_seed(0)
        output = self.model(**batch, use_cache=False, **keys)
        if getattr(output, "loss", None) is None:
            raise UserError(f"{type(self.model).__name__} returns no loss for labels: give a language model")
        return output

    def observe(self, batch: dict[str, Tensor], **keys: object) -> Observed:
        """Run the model on a batch.

        Args:
            batch: its inputs and labels.
            keys: of the model's forward pass, such as output_router_logits.
        """
        if self.divides:
            keys["num_items_in_batch"] = torch.tensor(HUGE)
        hooks = Hooks(self.backbone, self.routers)
        try:
            output = self.run(batch, **keys)
        finally:
            hooks.remove()
        added = output.loss
        if not self.divides:
            added = added - nn.functional.cross_entropy(
                output.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
            )
        assert hooks.finished
        last, routings = hooks.finished
        return Observed(added, routings, replace(last, kept_N=None).routings(self.routers))


@contextmanager
def undisturbed(model: nn.Module, trained: Sequence[Tensor]) -> Iterator[None]:
    """Train `model` within the block, with gradients of `trained` alone; then all is as before."""
    modes = [(module, module.training) for module in model.modules()]
    states = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]  # some models move a bias in training
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    kept = {id(tensor) for tensor in trained}
    with torch.random.fork_rng(devices), torch.enable_grad():
        try:
            for parameter, _, _ in states:
                parameter.grad = None
                parameter.requires_grad_(id(parameter) in kept)
            model.train()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, requires_grad, gradient in states:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


@dataclass(frozen=True)
class Fit:
    """A reading of the load balancing loss, `factor` E sum_i f_i P_i: f counts the K largest logits, P is a mean."""

    together: str  # the tokens of all layers | of each layer | of each sequence in each layer
    gating: str  # of the probabilities
    factor: float = 1.0

    @torch.no_grad()
    def of(self, routings: Sequence[Routing]) -> float:
        """Return the loss for these decisions, the mean over layers."""
        seen = [
            replace(routing, gating=self.gating, probs_NE=apply_gating(routing.logits_NE, self.gating))
            for routing in routings
        ]
        strategy: Balancing = PooledLoadBalancingLoss(1.0)
        if self.together != "all layers":
            strategy = LoadBalancingLoss(1.0, scope="micro" if self.together == "each layer" else "sequence")
        return self.factor * float(strategy.losses(seen, None).mean())


def fit(passes: Sequence[Observed], routers: Sequence[HFRouter], tolerance: float) -> Fit | None:
    """Return the first reading, the most usual first, that gives what was added in every pass; None if none does.

    Args:
        passes: without padding, more than two.
        routers: of the model.
        tolerance: of the relative deviation.
    """
    added_P = torch.tensor([observed.added.item() for observed in passes], dtype=torch.float64)
    gatings = dict.fromkeys(("softmax", routers[0].gating))
    together = ("all layers", "each layer", "each sequence")[1 if len(routers) == 1 else 0 :]
    for reading in (Fit(*kind) for kind in product(together, gatings)):
        loss_P = torch.tensor([reading.of(observed.routings) for observed in passes], dtype=torch.float64)
        factor = float((loss_P @ added_P) / (loss_P @ loss_P))
        if bool(((factor * loss_P - added_P).abs() <= tolerance * added_P.abs()).all()):
            return replace(reading, factor=factor)
    return None


@dataclass(frozen=True)
class Knob:
    """A number by which the loss may be multiplied: an attribute of the model, or a key of its config."""

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """Its value now."""
        return getattr(self.owner, self.name)

    @contextmanager
    def at(self, value: float) -> Iterator[None]:
        """Set it within the block."""
        before = self.value
        setattr(self.owner, self.name, value)
        try:
            yield
        finally:
            setattr(self.owner, self.name, before)


def knobs(owner: Any) -> list[Knob]:
    """Return the attributes of a module or config that may be a coefficient."""
    names = [name for name in vars(owner) if "coef" in name and not name.startswith("_")]
    return [Knob(owner, name) for name in names if isinstance(getattr(owner, name), int | float)]


class OwnLoss:
    """The auxiliary loss of a model's own code."""

    def __init__(self, experiment: Experiment) -> None:
        """See what is added to the loss with the settings that the model has, and with its auxiliary loss on."""
        self.experiment, self.model = experiment, experiment.model
        self.layers, self.top_k = len(experiment.routers), experiment.routers[0].top_k
        narrow = torch.finfo(experiment.embedding.dtype).bits < 32
        self.tolerance = 0.03 if narrow else 2e-3  # of a relative deviation
        self.batch = experiment.batch(7, 2, 5)
        self.knob, self.on = self._turn_on()

    def _added(self) -> float:
        """Return what is added to the loss of a batch when the auxiliary loss is on."""
        return self.experiment.observe(self.batch, **{SETTING: True}).added.item()

    def _turn_on(self) -> tuple[Knob | None, float]:
        """Return the knob that moves the loss, found by turning each, and what is added with the loss on."""
        on = self._added()
        for module in self.model.modules():
            for knob in knobs(module):
                with knob.at(knob.value + 1.0):
                    moved = self._added()
                if self._differ(moved, on):
                    return knob, on
        return None, on

    def _differ(self, one: float, other: float) -> bool:
        """Whether the two differ by more than the rounding of the cross-entropy that may be in them."""
        noise = 1e-9 if self.experiment.divides else 1e-4
        return abs(one - other) > noise + self.tolerance / 10 * max(abs(one), abs(other))

    def findings(self) -> Iterator[Finding]:
        """Yield what is to be said of the loss."""
        if self.knob is None and not self._differ(self.on, 0.0):
            yield Finding(
                "no_loss", "its code has no auxiliary loss, whatever its settings: no gradient balances its experts",
                f"{ATTACH} the load of each layer",
            )  # fmt: skip
            return
        yield from self._settings()
        if self.knob is None:
            yield from self._formula()
            return
        with self.knob.at(1.0):
            yield from self._formula()
        yield from self._config()

    def _settings(self) -> Iterator[Finding]:
        """Yield whether the loss is on."""
        if self.knob and not self.knob.value:
            name = f"model.{self.knob.name}"
            yield Finding("zero", f"its auxiliary loss adds nothing: {name} is 0", f"set {name} to train with it")
        with self.knob.at(1.0) if self.knob else nullcontext():
            now = self.experiment.observe(self.batch).added.item()
        if not self._differ(now, 0.0):
            yield Finding(
                "off", f"its auxiliary loss is off: config.{SETTING} is False, so that {self._size()} is not used",
                f"set model.config.{SETTING} = True, or attach a loss, which needs no such setting",
            )  # fmt: skip
        elif self.knob is None or self.knob.value:
            yield Finding("on", f"its auxiliary loss is added to the loss, with {self._size()}")

    def _size(self) -> str:
        return f"model.{self.knob.name} = {self.knob.value:g}" if self.knob else "a coefficient in its code"

    def _config(self) -> Iterator[Finding]:
        """Yield what does not move the loss although it is called like what does."""
        assert self.knob is not None
        before = self._added()
        for knob in knobs(getattr(self.model, "config", self)):
            if knob.name != self.knob.name:
                continue
            with knob.at(knob.value + 1.0):
                if not self._differ(self._added(), before):
                    yield Finding(
                        "config_is_deaf", f"config.{knob.name} is read only when the model is made",
                        f"change model.{knob.name} instead, or give the key to from_pretrained",
                    )  # fmt: skip

    def _formula(self) -> Iterator[Finding]:
        """Yield what the loss is, with the knob at 1."""
        passes = [self.experiment.observe(batch, **{SETTING: True}) for batch in self.experiment.batches()]
        found = fit(passes, self.experiment.routers, self.tolerance)
        if found is None:
            yield Finding("unknown", "what it adds to the loss is no known reading of the load balancing loss")
        else:
            yield from self._terms(found)
            yield from self._tokens(found)
        yield self._gradient()
        if self.experiment.divides:
            yield Finding(
                "accumulation",
                "num_items_in_batch, which the Trainer gives, divides the cross-entropy and not this loss: with G "
                "micro-batches in a step it counts G times",
                "divide its coefficient by gradient_accumulation_steps, or use attach_trainer, whose losses are means",
            )  # fmt: skip

    def _terms(self, found: Fit) -> Iterator[Finding]:
        times = f"model.{self.knob.name} x " if self.knob else ""
        gating = self.experiment.routers[0].gating
        factor = "" if abs(found.factor - 1) < self.tolerance else f"{found.factor:.4g} x "
        yield Finding(
            "formula", f"it is {times}{factor}E sum_i f_i P_i {TOGETHER[found.together]}; f_i: share of tokens with "
            f"i among the {self.top_k} largest logits, P_i: mean {found.gating} of the logits",
        )  # fmt: skip
        if self.top_k > 1 and not factor:
            yield Finding(
                "factor_k", f"its f_i sum to K = {self.top_k}: at uniform use it is {self.top_k} and not 1, so that a "
                f"coefficient acts {self.top_k} times as strong as where the f_i sum to 1",
                f"divide a coefficient by {self.top_k} that was tuned where the f_i sum to 1 (norm='E/K')",
            )  # fmt: skip
        if found.together == "all layers":
            yield Finding("pooled", "opposite imbalances of two layers cancel in it", f"{ATTACH} each layer by itself")
        if found.gating != gating:
            yield Finding("other_gating", f"its P_i are of the {found.gating}, and the router weighs by {gating}")

    def _tokens(self, found: Fit) -> Iterator[Finding]:
        """Yield whether padding is counted, by a batch with padding."""
        padded = self.experiment.batch(3, 3, 9)
        for row, length in enumerate((16, 9, 4)):
            padded["attention_mask"][row, length:] = 0
        padded["labels"] = padded["labels"].masked_fill(padded["attention_mask"] == 0, -100)
        observed = self.experiment.observe(padded, **{SETTING: True})
        added = observed.added.item()
        without, including = (
            abs(added - found.of(routings)) <= self.tolerance * abs(added)
            for routings in (observed.routings, observed.all_routings)
        )
        if without:
            yield Finding("mask", "padding is left out, where the forward pass is given an attention_mask")
        elif including:
            yield Finding(
                "padding", "padding counts as tokens, although the forward pass is given an attention_mask",
                f"{ATTACH} tokens alone; or train without padding",
            )  # fmt: skip

    def _gradient(self) -> Finding:
        """Return how many routers the loss has a gradient to."""
        weights = [router.weight_ED for router in self.experiment.routers]
        added = self.experiment.observe(self.batch, **{SETTING: True}).added
        if added.requires_grad:
            added.backward()
        least = 1e-12 if self.experiment.divides else 1e-6  # rounding of the cross-entropy's gradient
        reached = sum(weight_ED.grad is not None and float(weight_ED.grad.norm()) > least for weight_ED in weights)
        for weight_ED in weights:
            weight_ED.grad = None
        if reached == self.layers:
            return Finding("gradient", f"its gradient reaches all {reached} routers")
        return Finding(
            "no_gradient", f"its gradient reaches {reached} of {self.layers} routers, and balances no other",
            "where gradient checkpointing has dropped it, enable that with {'use_reentrant': False}",
        )  # fmt: skip


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
    experiment = Experiment(model)
    routers, rule = experiment.routers, experiment.routers[0].rule
    frozen = not any(router.weight_ED.requires_grad for router in routers)
    biases = [router.bias for router in routers if router.bias is not None and router.bias.requires_grad]
    with (
        paused(routers),
        undisturbed(model, [experiment.embedding, *(router.weight_ED for router in routers), *biases]),
    ):
        findings = [*OwnLoss(experiment).findings(), *bias_findings(experiment)]
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


def bias_findings(experiment: Experiment) -> Iterator[Finding]:
    """Yield whether a bias on the choice is moved by training, found by a forward and a backward pass."""
    biases = {router.name: router.bias_E for router in experiment.routers}
    held = {name: bias_E for name, bias_E in biases.items() if bias_E is not None}
    if not held:
        return
    before = {name: bias_E.detach().clone() for name, bias_E in held.items()}
    experiment.run(experiment.batch(0, 2, 32)).loss.backward()
    moved = [name for name, bias_E in held.items() if not torch.equal(bias_E, before[name])]
    learning = [
        router.name for router in experiment.routers if router.bias is not None and router.bias.grad is not None
    ]
    if moved or learning:
        yield Finding("moving_bias", f"training moves the bias on the choice of experts of {[*moved, *learning][0]}")
        return
    size = f"in {len(held)} layers, at most {max(float(bias_E.abs().max()) for bias_E in before.values()):.3g} now"
    yield Finding(
        "idle_bias", f"its bias on the choice of experts ({size}) is moved by nothing: no forward pass changes it, and "
        "no gradient reaches it", "attach(model, LossFree(bias_on='scores')) moves it",
    )  # fmt: skip

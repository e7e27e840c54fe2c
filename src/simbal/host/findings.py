"""What there is to find about the auxiliary loss of a host model's own code, in sentences."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simbal.host.own_loss import Fit, Observed, Subject, fit

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

    def __init__(self, subject: Subject) -> None:
        """See what is added to the loss with the settings that the model has, and with its auxiliary loss on."""
        self.subject, self.model = subject, subject.model
        self.layers, self.top_k = len(subject.routers), subject.routers[0].top_k
        narrow = torch.finfo(subject.embedding.dtype).bits < 32
        self.tolerance = 0.03 if narrow else 2e-3  # of a relative deviation
        self.batch = subject.batch(7, 2, 5)
        self.knob, self.on = self._turn_on()

    def _added(self, batch: dict[str, Tensor] | None = None) -> float:
        """Return what is added to the loss of a batch when the auxiliary loss is on."""
        return float(self.subject.observe(batch or self.batch, **{SETTING: True}).added.detach())

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
        noise = 1e-9 if self.subject.divides else 1e-4
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
            now = float(self.subject.observe(self.batch).added.detach())
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
        passes = [self.subject.observe(batch, **{SETTING: True}) for batch in self.subject.batches()]
        found = fit(passes, self.subject.routers, self.tolerance)
        if found is None:
            yield Finding("unknown", "what it adds to the loss is no known reading of the load balancing loss")
        else:
            yield from self._terms(found)
            yield from self._tokens(found)
        yield self._gradient()
        if self.subject.divides:
            yield Finding(
                "accumulation",
                "num_items_in_batch, which the Trainer gives, divides the cross-entropy and not this loss: with G "
                "micro-batches in a step it counts G times",
                "divide its coefficient by gradient_accumulation_steps, or use attach_trainer, whose losses are means",
            )  # fmt: skip

    def _terms(self, found: Fit) -> Iterator[Finding]:
        times = f"model.{self.knob.name} x " if self.knob else ""
        reading, gating = found.reading, self.subject.routers[0].gating
        factor = "" if abs(found.factor - 1) < self.tolerance else f"{found.factor:.4g} x "
        yield Finding(
            "formula", f"it is {times}{factor}E sum_i f_i P_i {TOGETHER[reading.together]}; f_i: share of tokens with "
            f"i among the {self.top_k} largest logits, P_i: mean {reading.gating} of the logits",
        )  # fmt: skip
        if self.top_k > 1 and not factor:
            yield Finding(
                "factor_k", f"its f_i sum to K = {self.top_k}: at uniform use it is {self.top_k} and not 1, so that a "
                f"coefficient acts {self.top_k} times as strong as where the f_i sum to 1",
                f"divide a coefficient by {self.top_k} that was tuned where the f_i sum to 1 (norm='E/K')",
            )  # fmt: skip
        if reading.together == "all layers":
            yield Finding("pooled", "opposite imbalances of two layers cancel in it", f"{ATTACH} each layer by itself")
        if reading.gating != gating:
            yield Finding("other_gating", f"its P_i are of the {reading.gating}, and the router weighs by {gating}")

    def _matches(self, found: Fit, observed: Observed, padding: bool) -> bool:
        """Whether the fitted loss is what was added, over the tokens with or without padding."""
        added = float(observed.added.detach())
        fitted = found.of(observed.all_routings if padding else observed.routings)
        return abs(added - fitted) <= self.tolerance * abs(added)

    def _tokens(self, found: Fit) -> Iterator[Finding]:
        """Yield whether padding is counted, by a batch with padding."""
        padded = self.subject.batch(3, 3, 9)
        for row, length in enumerate((16, 9, 4)):
            padded["attention_mask"][row, length:] = 0
        padded["labels"] = padded["labels"].masked_fill(padded["attention_mask"] == 0, -100)
        observed = self.subject.observe(padded, **{SETTING: True})
        if self._matches(found, observed, padding=False):
            yield Finding("mask", "padding is left out, where the forward pass is given an attention_mask")
        elif self._matches(found, observed, padding=True):
            yield Finding(
                "padding", "padding counts as tokens, although the forward pass is given an attention_mask",
                f"{ATTACH} tokens alone; or train without padding",
            )  # fmt: skip

    def _gradient(self) -> Finding:
        """Return how many routers the loss has a gradient to."""
        weights = [router.weight_ED for router in self.subject.routers]
        added = self.subject.observe(self.batch, **{SETTING: True}).added
        if added.requires_grad:
            added.backward()
        least = 1e-12 if self.subject.divides else 1e-6  # rounding of the cross-entropy's gradient
        reached = sum(weight_ED.grad is not None and float(weight_ED.grad.norm()) > least for weight_ED in weights)
        for weight_ED in weights:
            weight_ED.grad = None
        if reached == self.layers:
            return Finding("gradient", f"its gradient reaches all {reached} routers")
        return Finding(
            "no_gradient", f"its gradient reaches {reached} of {self.layers} routers, and balances no other",
            "where gradient checkpointing has dropped it, enable that with {'use_reentrant': False}",
        )  # fmt: skip

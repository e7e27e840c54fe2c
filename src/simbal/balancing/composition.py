"""Any set of strategies at once: the objective's auxiliary part, and the one hand on the routers.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep
from simbal.config.schedule import Schedule
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing


class Composition(nn.Module):
    """Losses add, each with its own schedule; at most one strategy may decide the choice of experts."""

    def __init__(
        self, parts: Mapping[str, Balancing], schedules: Mapping[str, Schedule], layer_reduce: str = "sum"
    ) -> None:
        """Put strategies together.

        Args:
            parts: each strategy by name.
            schedules: the factor of a strategy's coefficient over the steps; a strategy without one keeps it.
            layer_reduce: sum or mean of a loss over layers, where the strategy does not say.

        Raises:
            UserError: two strategies choose experts, or two adjust logits.
        """
        super().__init__()
        self.strategies = nn.ModuleDict(parts)
        self.schedules, self.layer_reduce = dict(schedules), layer_reduce
        self._chooser = self._only("choice_scores", "choose a token's experts")
        self._adjuster = self._only("adjust_logits", "adjust the router's logits")

    def _only(self, method: str, does: str) -> str | None:
        """Name of the strategy that overrides `method`; `UserError` if there are two."""
        names = [n for n, part in self.parts.items() if getattr(type(part), method) is not getattr(Balancing, method)]
        if len(names) > 1:
            raise UserError(f"balancing: {' and '.join(names)} both {does}, and only one strategy of a set can")
        return names[0] if names else None

    @property
    def parts(self) -> dict[str, Balancing]:
        """The strategies by name."""
        return {name: cast(Balancing, part) for name, part in self.strategies.items()}

    @property
    def chooser(self) -> str | None:
        """Name of the strategy that chooses a token's experts."""
        return self._chooser

    @property
    def steers(self) -> bool:
        """A router decides otherwise than it would alone."""
        return self._chooser is not None or self._adjuster is not None

    @property
    def router_init(self) -> str:
        """What the parts prefer: orthogonal if any of them does."""
        return "orthogonal" if "orthogonal" in {part.router_init for part in self.parts.values()} else "normal"

    @property
    def needs_step_counts(self) -> bool:
        """Some loss needs what is measured over the whole step."""
        return any(part.needs_step_counts for part in self.parts.values())

    def prepare(self, routers: Sequence[Router]) -> None:
        """Every strategy sees the routers once, at their initial weights."""
        for part in self.parts.values():
            part.prepare(routers)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """By the strategy that does so, if one does."""
        return logits_NE if self._adjuster is None else self.parts[self._adjuster].adjust_logits(logits_NE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """By the strategy that chooses, if one does; otherwise the logits."""
        if self._chooser is None:
            return candidates.logits_NE
        return self.parts[self._chooser].choice_scores(candidates)

    def layer_reduction(self, name: str) -> str:
        """sum or mean: how the losses of strategy `name` are reduced over layers."""
        return self.parts[name].over_layers or self.layer_reduce

    def losses(
        self, routings: Sequence[Routing], step: int = 0, step_counts: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The term of each strategy that has a loss, a scalar; a dense model has no layer, hence no loss."""
        terms = {}
        for name, part in self.parts.items() if routings else ():
            if part.properties.differentiable:
                loss_L = part.losses(routings, step_counts[name] if step_counts and part.needs_step_counts else None)
                reduced = loss_L.sum() if self.layer_reduction(name) == "sum" else loss_L.mean()
                terms[name] = self.schedule(name).factor(step) * reduced
        return terms

    def schedule(self, name: str) -> Schedule:
        """Of strategy `name`."""
        return self.schedules.get(name, Schedule())

    @torch.no_grad()
    def measure(self, routings: Sequence[Routing]) -> dict[str, Tensor]:
        """(L, E) for each strategy, to be summed over the step."""
        return {name: part.measure(routings) for name, part in self.parts.items()} if routings else {}

    @torch.no_grad()
    def update(
        self,
        measured: Mapping[str, Tensor],
        num_measured: int,
        router_weights: Sequence[Tensor],
        lr: float,
        step: int,
    ) -> None:
        """Tell every strategy that optimizer step `step` is done, with the sums of what it measured."""
        for name, measured_LE in measured.items():
            factor = self.schedule(name).factor(step)
            self.parts[name].update(FinishedStep(measured_LE, num_measured, router_weights, lr, factor))

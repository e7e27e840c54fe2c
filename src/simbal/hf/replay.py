"""Routing replay: record which experts each token gets, and give it the same experts in other forward passes.

Only the choice is replayed. The model's own code computes the experts' weights from the live logits, so routers get
their usual gradient. A token is identified by its sequence and its position there, so the passes may differ in batch
size, padding and packing, and the recorded passes may generate token by token.

Reference: arXiv 2510.11370 (rollout routing replay).
Shapes: B sequences, S sequence length, N = B*S tokens, R recorded tokens, E experts, K experts per token.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from simbal.errors import UserError
from simbal.hf.routers import HFRouter, find_backbone, find_routers


@dataclass
class Routes:
    """The experts that tokens got in each layer. Padding has no routes.

    Sequences are numbered in the order of the forward passes, from 0. A sequence begins at position 0.
    """

    experts: list[Tensor]  # of each layer, (R, K) int16, in the order of the router's output
    positions_R2: Tensor  # int64: the number of each token's sequence, and the token's position in it

    def rows(self, positions_N2: Tensor) -> Tensor:
        """Return the last row with each of these positions, (N,), or -1 if the token was not recorded."""
        recorded_R, order_R = _keys(self.positions_R2.to(positions_N2.device)).sort(stable=True)
        keys_N = _keys(positions_N2)
        last_N = (torch.searchsorted(recorded_R, keys_N, right=True) - 1).clamp(min=0)
        return torch.where(recorded_R[last_N] == keys_N, order_R[last_N], -1)


def _keys(positions_N2: Tensor) -> Tensor:
    """Return one number per (sequence, position), (N,)."""
    return (positions_N2[:, 0] << 32) + positions_N2[:, 1]


@contextmanager
def record(model: nn.Module) -> Iterator[Routes]:
    """Record the experts of every token in the forward passes within the block.

        with record(model) as routes:
            model.generate(**prompts)
        with replay(model, routes):
            model(**batch).loss.backward()

    The routes are complete when the block ends. With strategies attached, their choice is recorded. Beam search, which
    moves tokens between sequences, cannot be recorded.

    Raises:
        UserError: the model has no known routers.
    """
    routers = find_routers(model)
    recorder, routes = Recorder(routers), Routes([], torch.empty(0, 2, dtype=torch.int64))
    with recorder.hooked(find_backbone(model, routers)):
        yield routes
    if recorder.positions:
        positions_N2 = torch.cat(recorder.positions)
        kept_N = positions_N2[:, 0] >= 0
        routes.positions_R2 = positions_N2[kept_N]
        routes.experts = [torch.cat(tables)[kept_N.to(tables[0].device)] for tables in recorder.tables]


@contextmanager
def replay(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Give each token its recorded experts in the forward passes within the block.

    The n-th sequence of these passes gets the routes of the n-th recorded sequence. Tokens that were not recorded, such
    as the last token of a generated text, get the router's own choice. With gradient checkpointing, call backward
    within the block, before the next forward pass.

    Args:
        model: a model with as many layers, experts and experts per token as the recorded one.
        routes: from `record`, or tables of another engine in the same form.

    Raises:
        UserError: the routes do not fit the model, a pass contains none of their tokens, or a router does not follow
            them.
    """
    routers = find_routers(model)
    layers, top_k = len(routers), routers[0].top_k
    if [table.shape[1] for table in routes.experts] != layers * [top_k]:
        raise UserError(f"the routes do not fit {type(model).__name__}: it has {layers} MoE layers with K = {top_k}")
    with Replayer(routers, routes).hooked(find_backbone(model, routers)):
        yield


class Passes:
    """Hooks that follow the forward passes of a model and identify their tokens."""

    def __init__(self, routers: Sequence[HFRouter]) -> None:
        self.routers, self.running = routers, False
        self._first = self._count = 0  # number of the first sequence in this pass, and of sequences

    @contextmanager
    def hooked(self, backbone: nn.Module) -> Iterator[None]:
        """Register the hooks on the model within the block."""
        with ExitStack() as stack:
            for handle in self._register(backbone):
                stack.callback(handle.remove)
            yield

    def _register(self, backbone: nn.Module) -> Iterator[Any]:
        yield backbone.register_forward_pre_hook(self._start, with_kwargs=True)
        yield backbone.register_forward_hook(self._finish)
        for router in self.routers:
            yield router.module.register_forward_pre_hook(partial(self.before, router))
            yield router.module.register_forward_hook(partial(self.after, router), always_call=True)

    def _start(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = inspect.signature(backbone.forward).bind(*args, **kwargs).arguments | kwargs
        self.running = True
        self.start(self._positions(inputs))

    def _finish(self, *_: object) -> None:
        self.running = False

    def _positions(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the sequence and the position of each token in a pass, (N, 2); -1 for padding."""
        position_BS, kept_BS = token_positions(inputs)
        row_B = torch.arange(len(position_BS), device=position_BS.device)
        row_R, position_R = row_B[:, None].expand_as(position_BS)[kept_BS], position_BS[kept_BS]
        begins_R = position_R == 0
        changes_R = begins_R | (row_R.diff(prepend=row_R.new_full((1,), -1)) != 0)
        if begins_R.any():  # else the pass continues the sequences of the last one
            self._first += self._count
            self._count = int(changes_R.sum())
        positions_N2 = position_BS.new_full((position_BS.numel(), 2), -1)
        positions_N2[kept_BS.flatten()] = torch.stack([self._first + changes_R.cumsum(0) - 1, position_R], 1)
        return positions_N2

    def start(self, positions_N2: Tensor) -> None:
        """Begin a pass."""

    def before(self, router: HFRouter, module: nn.Module, args: Any) -> None:
        """Prepare the call of a router."""

    def after(self, router: HFRouter, module: nn.Module, args: Any, output: Any) -> None:
        """Read the output of a router; it is None if the router raised an error."""


def token_positions(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return each token's position in its sequence and whether it is not padding, (B, S) each.

    Args:
        inputs: arguments of the backbone.
    """
    x = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    mask, cache, position = (inputs.get(key) for key in ("attention_mask", "past_key_values", "position_ids"))
    sequences, length = x.shape[:2]
    if not (isinstance(mask, Tensor) and mask.dim() == 2):
        cached = 0 if cache is None else int(cache.get_seq_length())
        mask = torch.ones(sequences, cached + length, device=x.device)
    if position is None:
        position = (mask.long().cumsum(1) - 1)[:, -length:]  # the mask also covers cached tokens
    return position.long().expand(sequences, length), mask[:, -length:].bool()


class Recorder(Passes):
    """Records the experts of each layer and the positions of the tokens, one tensor per pass."""

    def __init__(self, routers: Sequence[HFRouter]) -> None:
        super().__init__(routers)
        self.positions: list[Tensor] = []
        self.tables: list[list[Tensor]] = [[] for _ in routers]

    def start(self, positions_N2: Tensor) -> None:
        """Keep the positions."""
        self.positions.append(positions_N2)

    def after(self, router: HFRouter, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the experts, unless gradient checkpointing is recomputing an earlier pass."""
        if self.running and output is not None:
            self.tables[router.layer].append(output[2].flatten(0, -2).to(torch.int16))


class Replayer(Passes):
    """Replaces the choice of every router by the recorded experts."""

    def __init__(self, routers: Sequence[HFRouter], routes: Routes) -> None:
        super().__init__(routers)
        self.routes = routes

    def start(self, positions_N2: Tensor) -> None:
        """Find the routes of the tokens."""
        self.rows_N = self.routes.rows(positions_N2)
        if not (self.rows_N >= 0).any():
            raise UserError("no token of this forward pass was recorded: replay sequences in the order of recording")

    def before(self, router: HFRouter, module: nn.Module, args: Any) -> None:
        """Fix the choice."""
        rows_N = self.rows_N.to(router.parameter_ED.device)
        experts_NK = self.routes.experts[router.layer].to(rows_N.device)[rows_N.clamp(min=0)].long()
        self.choice = FixedChoice(experts_NK, rows_N >= 0, len(router.parameter_ED))
        self.choice.__enter__()  # type: ignore[no-untyped-call]

    def after(self, router: HFRouter, module: nn.Module, args: Any, output: Any) -> None:
        """Release the choice, and check that the experts are the recorded ones."""
        self.choice.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not self.choice.is_followed(output[2].flatten(0, -2)):
            raise UserError(
                f"{router.name} did not choose the recorded experts: detach strategies that choose experts, and with "
                "gradient checkpointing call backward before the next forward pass"
            )


class FixedChoice(TorchFunctionMode):
    """Within the block, `topk` over E scores returns the experts of `experts_NK` for the tokens in `fixed_N`."""

    def __init__(self, experts_NK: Tensor, fixed_N: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts_NK, self.fixed_N1, self.num_experts = experts_NK, fixed_N[:, None], num_experts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; let `topk` return the given experts and their scores."""
        result = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self.num_experts:
            return result
        own_NK = result.indices.flatten(0, -2)
        if own_NK.shape != self.experts_NK.shape:  # another topk, such as the scores of expert groups
            return result
        experts = torch.where(self.fixed_N1, self.experts_NK, own_NK).view_as(result.indices)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))

    def is_followed(self, experts_NK: Tensor) -> bool:
        """Whether the tokens in `fixed_N` got the given experts."""
        is_same = experts_NK.shape == self.experts_NK.shape
        return is_same and not bool(((experts_NK != self.experts_NK) & self.fixed_N1).any())

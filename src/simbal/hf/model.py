"""A model of Hugging Face as analyses see it: `hf=` of evaluate.py.

Its routers choose by the model's own code; what they decide is recorded by hooks, and changed where an analysis asks.
Every block of experts of transformers is a module that takes the tokens, the chosen experts and their weights. So one
expert alone is that module with one choice for each token, whatever the experts compute.
Shapes: B sequences, S sequence length, T = S + 1, Q new tokens, N tokens, R of them once for each kept choice, C of a
chunk, D model width, E experts, K experts per token, V ids.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from simbal.analysis.subject import Predicted, Pruned, Subject
from simbal.data.hub_tokenizer import HubTokenizer
from simbal.data.loader import ValidationSplit
from simbal.errors import UserError
from simbal.hf.hooks import Hooks
from simbal.hf.routers import HFRouter, Rule, SparseMixer, find_backbone
from simbal.metrics.similarity import RunningSimilarity
from simbal.model.expert_similarity import ExpertSimilarity
from simbal.model.router import Candidates, Groups, Routing, Steering

LOGITS_AT_ONCE = 1 << 28  # numbers of a pass, such as 2,048 tokens of 131,072 ids
LOGITS_IN_FP32 = 1 << 24
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x_ND, experts_NK, weights_NK -> y_ND
Around = Callable[[int, Experts, Tensor, Tensor, Tensor], Tensor]  # the layer, its experts, what they are called with


@dataclass(frozen=True)
class OwnChoice(Steering):
    """The choice that the model's routers make by themselves, as a `Steering` that others can stand around."""

    routers: Sequence[HFRouter]

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores by which the router's rule chooses, with its bias and its groups, (N, E)."""
        router = self.routers[candidates.layer]
        if router.rule.plain:
            return candidates.logits_NE
        return router.rule.scores(candidates.probs_NE, router.bias_E)


class HFModel(Subject):
    """A model of Hugging Face for analyses to work on, in evaluation mode and in the dtype of its weights."""

    reads: ClassVar[str] = "the model is given"
    precision_note: ClassVar[str] = "The weights are stored in {trained} and computed in {analysed}."

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        routers: Sequence[HFRouter] | UserError,
        text: HubTokenizer,
        validation: ValidationSplit,
        device: torch.device,
        precisions: dict[str, str],
    ) -> None:
        """Put the hooks on the model.

        Args:
            path: the folder that it came from.
            model: a causal language model of transformers.
            routers: of its MoE layers; none if it is dense, or what is wrong with them.
            text: its tokenizer.
            validation: the windows of the validation split.
            device: where its first layer is computed.
            precisions: the dtype of its files, and that in which it is computed.
        """
        self.path, self.model, self.text, self.validation, self.device = path, model, text, validation, device
        self._precisions, self._routers = precisions, routers
        self._known = [] if isinstance(routers, UserError) else [*routers]
        backbone = find_backbone(model, self._known) if self._known else None
        self._hooks = None if backbone is None else Hooks(backbone, self._known)

    @property
    def precisions(self) -> dict[str, str]:
        """The dtype of most numbers in its files, and that in which it is computed."""
        return self._precisions

    @property
    def seq_len(self) -> int:
        """Tokens of a window."""
        return int(self.validation.windows_WT.shape[1]) - 1

    @property
    def bytes_of_token_V(self) -> Tensor | None:
        """UTF-8 bytes that each id stands for; None: they are not known of this tokenizer."""
        if not self.text.knows_bytes:
            return None
        return torch.from_numpy(self.text.byte_len.astype("int64")).to(self.device)

    @property
    def steering(self) -> Steering:
        """The choice of its own routers; `UserError` where their rule gives no weight to another choice."""
        if isinstance(self._rule, SparseMixer):
            raise UserError(
                f"the routers of {self.path} weigh an expert by those that come close to it, chosen or not: nothing "
                "says what they would do without some"
            )
        return OwnChoice(self.routers)

    @property
    def backend(self) -> str | None:
        """The implementation of its experts."""
        return "transformers, eager" if self.routers else None

    @property
    def routers(self) -> Sequence[HFRouter]:
        """The router of every MoE layer, first layer first; `UserError` if they follow no rule that is known."""
        if isinstance(self._routers, UserError):
            raise UserError(str(self._routers))
        return self._routers

    @property
    def groups(self) -> Groups | None:
        """The groups of experts that limit a token's choice, or None."""
        return self._rule.groups if self._rule else None

    @property
    def _rule(self) -> Rule | None:
        return self.routers[0].rule if self.routers else None

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def active_parameters(self) -> int:
        """The parameters that a token passes through; all where the experts are not known."""
        idle = 0.0
        for router in self._known:
            held = sum(parameter.numel() for parameter in router.experts.parameters())
            idle += (1 - router.top_k / len(router.weight_ED)) * held
        return self.parameters - round(idle)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Compute without gradients within the block."""
        with torch.inference_mode():
            yield

    def sequences(self, batch_size: int) -> int:
        """Return how many sequences are read at once: fewer where their logits would fill the memory."""
        return max(1, min(batch_size, LOGITS_AT_ONCE // (self.seq_len * self.text.vocab_size)))

    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Yield the model's predictions for each batch; its own code chooses, or `steering`."""
        for windows_BT, documents_BS in self.batches(batch_size, tokens):
            with self.inference():
                if self._hooks:
                    self._hooks.steering = steering
                logits_BSV = self.model(input_ids=windows_BT[:, :-1], use_cache=False).logits
                nll_BS = negative_log_likelihood(logits_BSV, windows_BT[:, 1:])
            del logits_BSV  # before the next pass
            routings: list[Routing] = []
            if self._hooks and self._hooks.finished:
                routings = self._hooks.finished[1]
                self._hooks.forget()  # nothing of this pass is held in the next one
            yield Predicted(windows_BT, documents_BS, nll_BS, routings)

    @contextmanager
    def inputs(self) -> Iterator[list[Tensor]]:
        """Yield a list that holds the last input (N, D) of each MoE layer after every forward pass in the block."""
        inputs = [torch.empty(0)] * len(self.routers)

        def keep(index: int, inner: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            inputs[index] = x_ND
            return inner(x_ND, experts_NK, weights_NK)

        with around_experts(self.routers, keep):
            yield inputs

    @contextmanager
    def similarity(self) -> Iterator[ExpertSimilarity]:
        """Measure in every forward pass how alike the experts are; one expert's outputs are held at a time."""
        seen = ExpertSimilarity(len(self.routers))

        def measure(index: int, inner: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            running = RunningSimilarity()
            one_N1 = weights_NK.new_ones(len(x_ND), 1)
            for expert in range(self.num_experts):
                running.add(inner(x_ND, torch.full_like(one_N1, expert, dtype=torch.int64), one_N1))
            seen.add(index, running)
            return inner(x_ND, experts_NK, weights_NK)

        with around_experts(self.routers, measure):
            yield seen

    @contextmanager
    def pruned(self, pruning: Pruned) -> Iterator[list[int]]:
        """Compute the kept choices alone, each as a token of its own; yield how many each layer has kept so far."""
        kept_L = [0] * len(self.routers)

        def prune(index: int, inner: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            kept_NK = pruning.kept(weights_NK)
            left_NK = pruning.weights(weights_NK, kept_NK)
            token_R, slot_R = kept_NK.nonzero(as_tuple=True)
            kept_L[index] += len(token_R)
            y_ND = torch.zeros_like(x_ND)
            if len(token_R):
                y_RD = inner(x_ND[token_R], experts_NK[token_R, slot_R, None], left_NK[token_R, slot_R, None])
                y_ND.index_add_(0, token_R, y_RD)
            return y_ND

        with around_experts(self.routers, prune):
            yield kept_L

    def tokenizer(self) -> HubTokenizer:
        """Return its own tokenizer."""
        return self.text

    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that is given the next ids of the samples, and returns the logits after the last."""
        past: dict[str, Any] = {}

        def logits(next_BQ: Tensor) -> Tensor:
            if self._hooks:
                self._hooks.steering = None
            output = self.model(input_ids=next_BQ, use_cache=True, **past)
            past["past_key_values"] = output.past_key_values
            last_BV: Tensor = output.logits[:, -1, : self.text.vocab_size]
            return last_BV

        return logits

    def every_expert_flops(self) -> float:
        """Return the FLOPs of a pass with all experts by those of a plain pass, counted in one window."""
        plain = self.counted_flops()
        with self.similarity():
            return self.counted_flops() / plain

    def counted_flops(self) -> int:
        """Return the FLOPs of the matrix products of one window, counted while it is read."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with FlopCounterMode(display=False, custom_mapping={attention: _cpu_attention}) as counter:
            next(self.predict(1, 1))
        return int(counter.get_total_flops())


def negative_log_likelihood(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return -log p of each target in nats, (B, S), in fp32 whatever the logits are in; a part at a time."""
    logits_NV, targets_N = logits_BSV.flatten(0, 1), targets_BS.flatten().to(logits_BSV.device)
    rows = max(1, LOGITS_IN_FP32 // logits_NV.shape[1])
    parts = zip(torch.split(logits_NV, rows), torch.split(targets_N, rows), strict=True)
    nll_N = torch.cat([F.cross_entropy(logits_CV.float(), ids_C, reduction="none") for logits_CV, ids_C in parts])
    return nll_N.view_as(targets_BS)


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention by the kernel for CPUs, which PyTorch's counter does not know."""
    return int(sdpa_flop_count(query, key, value))


@contextmanager
def around_experts(routers: Sequence[HFRouter], wrapper: Around) -> Iterator[None]:
    """Compute the experts of every layer by `wrapper` within the block."""
    with ExitStack() as stack:
        for index, router in enumerate(routers):
            stack.enter_context(_around(router.experts, partial(wrapper, index)))
        yield


@contextmanager
def _around(experts: nn.Module, wrapper: Callable[[Experts, Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Compute one layer's experts by `wrapper` within the block.

    It stands within what accelerate puts around a module whose weights are elsewhere, so that they are there for it.
    """
    name = "_old_forward" if hasattr(experts, "_old_forward") else "forward"
    own, inner = vars(experts).get(name), getattr(experts, name)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts as they are called, by place or by name, with tokens in any number of dimensions."""
        first, second = (*args, *kwargs.values())[:2]
        choice, weights = (second, first) if first.is_floating_point() else (first, second)
        return wrapper(inner, x.flatten(0, -2), choice.flatten(0, -2), weights.flatten(0, -2)).view(x.shape)

    setattr(experts, name, forward)
    try:
        yield
    finally:
        if own is None:
            delattr(experts, name)
        else:
            setattr(experts, name, own)

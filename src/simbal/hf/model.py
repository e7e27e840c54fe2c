"""Hugging Face models as subjects of analyses, for `evaluate.py hf=`.

The model's own code chooses experts. Hooks record the decisions, and change them for analyses that need it. The
experts of an MoE block are one module that takes tokens, chosen experts and weights. To run a single expert, call this
module with one choice per token.
Shapes: B sequences, S sequence length, T = S + 1, Q new tokens, N tokens, R kept choices, D model width, E experts,
K experts per token, V token ids.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simbal.analysis.subject import NotApplicableError, Predicted, Pruned, Subject
from simbal.data.loader import ValidationSplit
from simbal.data.tokenizer import HubTokenizer
from simbal.errors import UserError
from simbal.hf.hooks import Hooks
from simbal.hf.routers import HFRouter, find_backbone
from simbal.metrics.similarity import RunningSimilarity
from simbal.model.expert_similarity import ExpertSimilarity
from simbal.model.router import Candidates, Routing, Steering

MAX_LOGITS = 1 << 28  # elements of the logits in one pass, such as 2,048 tokens x 131,072 token ids
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x_ND, experts_NK, weights_NK -> y_ND
Wrapper = Callable[[int, Experts, Tensor, Tensor, Tensor], Tensor]  # layer, experts, x_ND, experts_NK, weights_NK


@dataclass(frozen=True)
class OwnChoice(Steering):
    """The choice of the model's own routers as a `Steering`."""

    routers: Sequence[HFRouter]

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores (N, E) by which the router's rule chooses."""
        return self.routers[candidates.layer].choice_scores(candidates)


class HFModel(Subject):
    """A causal language model of transformers for analyses, in evaluation mode and in the dtype of its weights."""

    reads: ClassVar[str] = "the model is given"
    precision_note: ClassVar[str] = "The weights are stored in {trained} and computed in {analyzed}."

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        routers: list[HFRouter],
        router_error: UserError | None,
        text: HubTokenizer,
        validation: ValidationSplit,
        device: torch.device,
        precisions: dict[str, str],
        backend: str,
        load_variant: Callable[[str | None, str | None, str | None], "HFModel"],
    ) -> None:
        """Register hooks on the model.

        Args:
            path: folder of the model.
            model: causal language model of transformers.
            routers: routers of the MoE layers, empty for a dense model.
            router_error: why the routers of an MoE are unknown.
            text: tokenizer of the model.
            validation: windows of the validation split.
            device: device of the first layer.
            precisions: dtype of the files (`trained`) and of the computation (`analyzed`).
            backend: implementation of the experts.
            load_variant: loads the model for `variant`.
        """
        self.path, self.model, self.text, self.validation, self.device = path, model, text, validation, device
        self.precisions, self.known_routers, self._router_error = precisions, routers, router_error
        self.backend, self._load_variant = backend, load_variant
        self.bytes_of_token_V = torch.from_numpy(text.byte_len.astype("int64")).to(device) if text.knows_bytes else None
        self.hooks = Hooks(find_backbone(model, routers), routers) if routers else None

    @property
    def choosable(self) -> int:
        """The number of experts that a token can choose from: with groups, those of its best groups."""
        groups = self.routers[0].rule.groups if self.routers else None
        return self.num_experts * groups.chosen // groups.count if groups else self.num_experts

    @property
    def steering(self) -> Steering:
        """The choice of the model's routers; `UserError` if their rule defines no weights for other choices."""
        if any(router.rule.samples_in_training for router in self.routers):
            raise UserError(f"the routers of {self.path} define no weights for experts that they do not choose")
        return OwnChoice(self.routers)

    @property
    def routers(self) -> Sequence[HFRouter]:
        """The router of every MoE layer, first layer first; `UserError` if their rule is unknown."""
        if self._router_error:
            raise self._router_error
        return self.known_routers

    def inference(self) -> AbstractContextManager[None]:
        """Return a context manager that disables gradients."""
        return torch.no_grad()  # in inference_mode, FlopCounterMode fails if a module takes a parameter (AFMoE's bias)

    def sequences(self, batch_size: int) -> int:
        """Return the batch size, reduced if the logits would take too much memory."""
        return max(1, min(batch_size, MAX_LOGITS // (self.seq_len * self.text.vocab_size)))

    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Yield the predictions for each batch. Experts are chosen by the model's own code, or by `steering`."""
        for windows_BT, documents_BS in self.batches(batch_size, tokens):
            with self.inference():
                if self.hooks:
                    self.hooks.steering = steering
                logits_BSV = self.model(input_ids=windows_BT[:, :-1], use_cache=False).logits
                nll_BS = negative_log_likelihood(logits_BSV, windows_BT[:, 1:])
            del logits_BSV  # before the next pass
            routings: list[Routing] = []
            if self.hooks and self.hooks.finished:
                routings = self.hooks.finished[1]
                self.hooks.forget()  # frees the tensors of this pass before the next one
            yield Predicted(windows_BT, documents_BS, nll_BS, routings)

    @contextmanager
    def inputs(self) -> Iterator[list[Tensor]]:
        """Yield a list that holds the last input (N, D) of each MoE layer after every forward pass in the block."""
        inputs = [torch.empty(0)] * len(self.routers)

        def keep(layer: int, experts: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            inputs[layer] = x_ND
            return experts(x_ND, experts_NK, weights_NK)

        with wrapped_experts(self.routers, keep):
            yield inputs

    @contextmanager
    def similarity(self) -> Iterator[ExpertSimilarity]:
        """Measure the similarity of the experts in every forward pass; memory holds one expert's outputs at a time."""
        watched = ExpertSimilarity(len(self.routers))

        def measure(layer: int, experts: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            running = RunningSimilarity()
            one_N1 = weights_NK.new_ones(len(x_ND), 1)
            for expert in range(self.num_experts):
                running.add(run_single(experts, x_ND, torch.full_like(one_N1, expert, dtype=torch.int64), one_N1))
            watched.add(layer, running)
            return experts(x_ND, experts_NK, weights_NK)

        with wrapped_experts(self.routers, measure):
            yield watched

    @contextmanager
    def pruned(self, pruning: Pruned) -> Iterator[list[int]]:
        """Compute only the kept choices, each as a separate token; yield each layer's number of kept choices so far."""
        kept_L = [0] * len(self.routers)

        def prune(layer: int, experts: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            kept_NK = pruning.kept(weights_NK)
            weights_NK = pruning.weights(weights_NK, kept_NK)
            token_R, slot_R = kept_NK.nonzero(as_tuple=True)
            kept_L[layer] += len(token_R)
            y_ND = torch.zeros_like(x_ND)
            if len(token_R):
                row_R = (token_R, slot_R, None)
                y_RD = run_single(experts, x_ND[token_R], experts_NK[row_R], weights_NK[row_R])
                y_ND.index_add_(0, token_R, y_RD)
            return y_ND

        with wrapped_experts(self.routers, prune):
            yield kept_L

    def variant(self, against: str | None, dtype: str | None = None, backend: str | None = None) -> "HFModel":
        """Load this model or another one; see `Subject.variant`."""
        return self._load_variant(against, dtype, backend)

    def tokenizer(self) -> HubTokenizer:
        """Return the model's tokenizer."""
        return self.text

    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that takes the next token ids of all samples and returns the logits after them."""
        past: dict[str, Any] = {}

        def next_logits(next_BQ: Tensor) -> Tensor:
            if self.hooks:
                self.hooks.steering = None
            output = self.model(input_ids=next_BQ, use_cache=True, **past)
            past["past_key_values"] = output.past_key_values
            last_BV: Tensor = output.logits[:, -1, : self.text.vocab_size]
            return last_BV

        return next_logits

    def every_expert_flops(self) -> float:
        """Return the FLOPs of a pass that also runs all experts, divided by the FLOPs of a plain pass."""
        plain = self.count_flops()
        with self.similarity():
            return self.count_flops() / plain

    def count_flops(self) -> int:
        """Count the FLOPs of the matrix products in a forward pass over one window."""
        # FlopCounterMode does not count the fused attention of the CPU
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            next(self.predict(1, 1))
        return int(counter.get_total_flops())


def negative_log_likelihood(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return -log p of each target in nats, (B, S), in fp32, one sequence at a time to save memory."""
    sequences = zip(logits_BSV, targets_BS.to(logits_BSV.device), strict=True)
    return torch.stack([F.cross_entropy(logits.float(), targets, reduction="none") for logits, targets in sequences])


def run_single(experts: Experts, x_ND: Tensor, expert_N1: Tensor, weight_N1: Tensor) -> Tensor:
    """Run one expert per token; `NotApplicableError` for experts that need several, as in LongCat-Flash."""
    try:
        return experts(x_ND, expert_N1, weight_N1)
    except ValueError as error:
        message = "redundancy and pruning run experts one at a time, but this model's experts do not support K = 1"
        raise NotApplicableError(message) from error


@contextmanager
def wrapped_experts(routers: Sequence[HFRouter], wrapper: Wrapper) -> Iterator[None]:
    """Call `wrapper` instead of the experts of every layer within the block."""
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            # accelerate loads offloaded weights in `forward` and calls the original as `_old_forward`
            name = "_old_forward" if hasattr(router.experts, "_old_forward") else "forward"
            original = getattr(router.experts, name)
            stack.callback(setattr, router.experts, name, original)
            setattr(router.experts, name, partial(_call_wrapper, partial(wrapper, layer, original)))
        yield


def _call_wrapper(
    wrapper: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, *args: Tensor, **kwargs: Tensor
) -> Tensor:
    """Accept choice and weights in any order, by position or by name, and tokens of any number of dimensions."""
    first, second = (*args, *kwargs.values())[:2]
    choice, weights = (second, first) if first.is_floating_point() else (first, second)
    return wrapper(x.flatten(0, -2), choice.flatten(0, -2), weights.flatten(0, -2)).view(x.shape)

"""A model of Hugging Face as analyses see it: `hf=` of evaluate.py.

Its routers choose by the model's own code; what they decide is recorded by hooks, and changed where an analysis asks.
Shapes: B sequences, S sequence length, T = S + 1, Q new tokens, N tokens, C of a chunk, E experts, V ids.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from simbal.analysis.shared.host_experts import pruned_experts, seen_inputs, seen_similarity
from simbal.analysis.shared.host_folder import HostFolder
from simbal.analysis.shared.subject import Predicted, Pruned, Subject
from simbal.data.hub_tokenizer import HubTokenizer
from simbal.data.loader import ValidationSplit
from simbal.errors import UserError
from simbal.host.hooks import Hooks
from simbal.host.routers import HostRouter
from simbal.host.rules import Rule, SparseMixer
from simbal.model.expert_similarity import Watched
from simbal.model.router import Candidates, Groups, Routing, Steering

LOGITS_AT_ONCE = 1 << 28  # numbers of a pass, such as 2,048 tokens of 131,072 ids
LOGITS_IN_FP32 = 1 << 24


@dataclass(frozen=True)
class OwnChoice(Steering):
    """The choice that the routers of a host make by themselves, as a `Steering` that others can stand around."""

    routers: Sequence[HostRouter]

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores by which the router's rule chooses, with its bias and its groups, (N, E)."""
        router = self.routers[candidates.layer]
        if router.rule.plain:
            return candidates.logits_NE
        return router.rule.scores(candidates.probs_NE, router.bias_E)


class HostModel(Subject):
    """A model of Hugging Face for analyses to work on, in evaluation mode and in the dtype of its weights."""

    reads: ClassVar[str] = "the model is given"

    def __init__(
        self,
        folder: HostFolder,
        model: nn.Module,
        routers: Sequence[HostRouter] | UserError,
        text: HubTokenizer,
        validation: ValidationSplit,
        backbone: nn.Module | None,
        device: torch.device,
        dtype: str,
    ) -> None:
        """Put the hooks on the model.

        Args:
            folder: where it came from.
            model: a causal language model of transformers.
            routers: of its MoE layers; none if it is dense, or what is wrong with them.
            text: its tokenizer.
            validation: the windows of the validation split.
            backbone: the part of the model that holds the routers; None without routers.
            device: where its first layer is computed.
            dtype: that in which it is computed, as `bfloat16`.
        """
        self.folder, self.path, self.model, self.text = folder, folder.path, model, text
        self.validation, self.device, self.dtype, self._routers = validation, device, dtype, routers
        known = [] if isinstance(routers, UserError) else routers
        self._routings: list[Routing] = []
        self._hooks = Hooks(backbone, known, None, self._keep) if backbone is not None else None

    @property
    def precisions(self) -> dict[str, str]:
        """The dtype of most numbers in its files, and that in which it is computed."""
        return {"trained": self.folder.dtype or "quantised", "analysed": self.dtype}

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
        """The choice of its own routers.

        Raises:
            UserError: its rule weighs an expert by those that were not chosen, so that no other choice has a weight.
        """
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
    def routers(self) -> Sequence[HostRouter]:
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
        routers = [] if isinstance(self._routers, UserError) else self._routers
        idle = [1 - router.top_k / len(router.weight_ED) for router in routers]
        held = [sum(parameter.numel() for parameter in router.experts.parameters()) for router in routers]
        return self.parameters - round(sum(share * count for share, count in zip(idle, held, strict=True)))

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
            yield Predicted(windows_BT, documents_BS, nll_BS, self._taken())

    def inputs(self) -> AbstractContextManager[list[Tensor]]:
        """Yield a list that holds the last input (N, D) of each MoE layer after every forward pass in the block."""
        return seen_inputs(self.routers)

    def similarity(self) -> AbstractContextManager[Watched]:
        """Measure in every forward pass within the block how alike the experts are."""
        return seen_similarity(self.routers)

    def pruned(self, pruning: Pruned) -> AbstractContextManager[list[int]]:
        """Compute only what `pruning` keeps within the block; yield how many choices each layer has kept so far."""
        return pruned_experts(self.routers, pruning)

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

    def _keep(self, last: Any, routings: list[Routing]) -> None:
        self._routings = routings

    def _taken(self) -> list[Routing]:
        """Return the routings of the last pass, and keep nothing of it."""
        routings, self._routings = self._routings, []
        if self._hooks:
            self._hooks.forget()
        return routings


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

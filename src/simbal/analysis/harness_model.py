"""A trained run as a model of lm-evaluation-harness, which asks for log-likelihoods and does all the scoring.

Importing this module takes the extra `eval`.
Reference: https://github.com/EleutherAI/lm-evaluation-harness
Shapes: B requests, T tokens of a window, S = T - 1, N scored tokens, C of one chunk, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from rich.progress import track
from torch import Tensor

from simbal.analysis.trained import TrainedRun
from simbal.data.tokenizer import Tokenizer
from simbal.model.router import Steering
from simbal.model.transformer import Transformer

ONLY_CHOICES = "every task of downstream is a choice between continuations"
LOGITS_AT_ONCE = 2**25  # numbers: 128 MB in fp32


class Ending(NamedTuple):
    """The log p of a continuation after its context, in nats, and whether each token was the most probable."""

    log_p: float
    greedy: bool


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model of the harness that gives log-likelihoods of continuations; it generates nothing."""

    def __init__(self, trained: TrainedRun, tokenizer: Tokenizer, batch_size: int) -> None:
        super().__init__()
        self.trained, self.text_tokenizer, self.batch_size = trained, tokenizer, batch_size

    @property
    def eot_token_id(self) -> int:
        """The id that stands before a continuation without context."""
        return self.text_tokenizer.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return ids without special tokens: text that spells one stays text."""
        return [int(token) for token in self.text_tokenizer.encode(string.encode())] if string else []

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return (log p, greedy) for each request as the harness does, without its progress bar."""
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        trained, found = self.trained, [(0.0, True)] * len(requests)
        pairs = [(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests]
        seq_len = trained.spec.config.data.seq_len
        with trained.inference():
            answers = endings(trained.model, trained.module.balancing, pairs, seq_len, self.batch_size)
            for place, ending in track(answers, "downstream", len(requests), transient=True):
                found[place] = ending
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse: the harness wants it declared, and no task of `downstream` asks for it."""
        raise AssertionError(ONLY_CHOICES)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refuse: the harness wants it declared, and no task of `downstream` asks for it."""
        raise AssertionError(ONLY_CHOICES)


@torch.inference_mode()
def endings(
    model: Transformer,
    steering: Steering | None,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    seq_len: int,
    batch_size: int,
) -> Iterator[tuple[int, Ending]]:
    """Yield the place of each request and its ending, the longest first, so that a batch is of about one length.

    Args:
        model: in evaluation.
        steering: of its routers.
        requests: ids of the context, at least one, and of the continuation.
        seq_len: of context and continuation less its last token the last `seq_len` are read; of a longer continuation
            only as many tokens are scored.
        batch_size: requests at once.
    """
    order = sorted(range(len(requests)), key=lambda place: -sum(map(len, requests[place])))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        yield from zip(places, _batch(model, steering, [requests[place] for place in places], seq_len), strict=True)


def _batch(
    model: Transformer,
    steering: Steering | None,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    seq_len: int,
) -> list[Ending]:
    windows = [[*context, *continuation][-seq_len - 1 :] for context, continuation in requests]
    scored = [min(len(continuation), seq_len) for _, continuation in requests]
    longest, device = max(map(len, windows)), model.head_VD.device
    # to the right of a sequence stands whatever: nothing before depends on it
    padded_BT = torch.tensor([[*window, *[0] * (longest - len(window))] for window in windows], device=device)
    hidden_BSD, _ = model(padded_BT[:, :-1], steering)
    states_ND = torch.cat(
        [
            hidden_SD[len(window) - 1 - count : len(window) - 1]
            for hidden_SD, window, count in zip(hidden_BSD, windows, scored, strict=True)
        ]
    )
    targets_N = torch.tensor(
        [token for window, count in zip(windows, scored, strict=True) for token in window[len(window) - count :]],
        device=device, dtype=torch.long,
    )  # fmt: skip
    log_p_N, greedy_N = _scores(states_ND, model.head_VD, targets_N)
    return [
        Ending(float(log_p.double().sum()), bool(greedy.all()))
        for log_p, greedy in zip(torch.split(log_p_N, scored), torch.split(greedy_N, scored), strict=True)
    ]


def _scores(states_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p of each target, (N,), and whether it is the most probable token, (N,)."""
    rows = max(1, LOGITS_AT_ONCE // len(head_VD))
    log_p, greedy = [], []
    for states_CD, targets_C in zip(torch.split(states_ND, rows), torch.split(targets_N, rows), strict=True):
        logits_CV = (states_CD @ head_VD.T).float()
        log_p.append(logits_CV.log_softmax(1).gather(1, targets_C[:, None])[:, 0])
        greedy.append(logits_CV.argmax(1) == targets_C)
    return torch.cat(log_p).cpu(), torch.cat(greedy).cpu()

"""How probable a model finds the end of a text.

Shapes: B requests of one batch, S inputs of the longest of them, N scored tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.model.router import Steering
from simbal.model.transformer import Transformer

LOGITS_AT_ONCE = 2**25  # numbers: 128 MB in fp32


@dataclass(frozen=True)
class Ending:
    """log p of a continuation after its context, in nats, and whether each of its tokens was the most probable."""

    log_p: float
    greedy: bool


@torch.inference_mode()
def endings(
    model: Transformer,
    steering: Steering | None,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    seq_len: int,
    batch_size: int,
) -> Iterator[tuple[int, Ending]]:
    """The place of each request and its ending, the longest first, so that a batch is of about one length.

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
    """log p of each target, and whether it is the most probable token."""
    rows = max(1, LOGITS_AT_ONCE // len(head_VD))
    log_p, greedy = [], []
    for states_CD, targets_C in zip(torch.split(states_ND, rows), torch.split(targets_N, rows), strict=True):
        logits_CV = (states_CD @ head_VD.T).float()
        log_p.append(logits_CV.log_softmax(1).gather(1, targets_C[:, None])[:, 0])
        greedy.append(logits_CV.argmax(1) == targets_C)
    return torch.cat(log_p).cpu(), torch.cat(greedy).cpu()

"""The analysis `quality`: how well a run predicts its validation split, with standard errors.

Shapes: B sequences, S sequence length, N tokens, G documents, V vocabulary.
"""

import math

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, check_pass
from simbal.config.values import whole_number
from simbal.metrics.definitions import bits_per_byte, perplexity
from simbal.model.router import Steering

FEW = 30  # documents; resamples of fewer are too much alike
DEFINITION = {
    "loss": "cross-entropy in nats, mean over the tokens of the validation split; no auxiliary loss, no z-loss",
    "ppl": "exp of loss",
    "bpb": "cross-entropy in bits, summed over tokens, by the UTF-8 bytes they stand for",
    "<number>_se": "its standard error: standard deviation over bootstrap resamples of whole documents",
}


def quality(subject: Subject, tokens: int | None, batch_size: int, resamples: int, seed: int) -> Result:
    """Measure loss, perplexity and bits per byte, each with its standard error.

    Args:
        subject: the model.
        tokens: drawn from the validation split; None: all of it.
        batch_size: sequences at once; it does not change the numbers.
        resamples: of the bootstrap, at least 2.
        seed: of the bootstrap.

    Raises:
        UserError: a key is out of its range.
    """
    check_pass("quality", tokens, batch_size)
    whole_number("analysis.quality.resamples", resamples, 2)
    whole_number("analysis.quality.seed", seed, 0)
    sums_G3 = document_sums(subject, tokens, batch_size)
    totals_3 = sums_G3.sum(0)
    spread = bootstrap(sums_G3, resamples, seed)
    nats, counted, num_bytes = (totals_3[0].item(), int(totals_3[1]), int(totals_3[2]))
    numbers = {"loss": nats / counted, "ppl": perplexity(nats, counted)}
    notes = [f"{counted:,} tokens of {len(sums_G3):,} documents."]
    if subject.bytes_of_token_V is None:
        notes.append("Bits per byte are left out: how many bytes a token stands for is not known of this tokenizer.")
    else:
        numbers["bpb"] = bits_per_byte(nats, num_bytes)
    notes += too_few(len(sums_G3))
    record = {
        "definition": DEFINITION,
        "tokens": counted,
        "documents": len(sums_G3),
        "metrics": numbers | {f"{name}_se": spread[name] for name in numbers},
    }
    return Result([_table(numbers, spread)], notes, record)


def document_sums(
    subject: Subject,
    tokens: int | None,
    batch_size: int,
    steering: Steering | None = None,
    title: str = "quality",  # title of the progress bar
) -> Tensor:
    """Return nats, tokens and bytes of each document that the validation windows touch, (G, 3), fp64.

    Bytes are 0 where they are not known.
    """
    byte_len_V = subject.bytes_of_token_V
    sums_G3 = torch.zeros(len(subject.validation.document_ends), 3, dtype=torch.float64)
    batches = track(
        subject.predict(batch_size, tokens, steering), title, subject.num_batches(batch_size, tokens), transient=True
    )
    for batch in batches:
        targets_N = batch.windows_BT[:, 1:].flatten()
        bytes_N = torch.zeros_like(targets_N) if byte_len_V is None else byte_len_V[targets_N]
        values_N3 = torch.stack([batch.nll_BS.flatten(), torch.ones_like(targets_N), bytes_N], 1).double()
        sums_G3.index_add_(0, batch.documents_BS.flatten().cpu(), values_N3.cpu())
    return sums_G3[sums_G3[:, 1] > 0]


def bootstrap(sums_G3: Tensor, resamples: int, seed: int) -> dict[str, float]:
    """Return the standard errors of `loss`, `ppl` and `bpb`, over resamples of the G documents."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(resamples):
        nats, tokens, num_bytes = sums_G3[torch.randint(len(sums_G3), (len(sums_G3),), generator=generator)].sum(0)
        loss = nats / tokens
        drawn.append(torch.stack([loss, loss.exp(), nats / (math.log(2) * num_bytes)]))
    loss, ppl, bpb = torch.stack(drawn).std(0).tolist()
    return {"loss": loss, "ppl": ppl, "bpb": bpb}


def too_few(documents: int) -> list[str]:
    """Return the sentence that `bootstrap` needs more documents, if it does."""
    said = f"Standard errors over {documents} documents are too small: take {FEW} or more, by more tokens."
    return [said] if documents < FEW else []


def _table(numbers: dict[str, float], spread: dict[str, float]) -> Table:
    rows = ([name, f"{value:.4f}", f"{spread[name]:.4f}"] for name, value in numbers.items())
    return numbers_table("quality on the validation split", ("", "value", "standard error"), rows)

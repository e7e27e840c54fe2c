"""The analysis `quality`: loss, perplexity and bits per byte on the validation split, with standard errors.

Shapes: B sequences, S sequence length, N tokens, G documents, C values per document, R resamples, V vocabulary.
"""

import math
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject
from simbal.metrics.definitions import bits_per_byte, perplexity
from simbal.model.router import Steering

FEW_DOCUMENTS = 30  # a bootstrap over fewer documents underestimates the standard error
DEFINITION = {
    "loss": "cross-entropy in nats, mean over the tokens of the validation split; no auxiliary loss, no z-loss",
    "ppl": "exp of loss",
    "bpb": "cross-entropy in bits, summed over tokens, divided by the UTF-8 bytes of the text",
    "<number>_se": "standard error: standard deviation over bootstrap resamples of whole documents",
}


def quality(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    resamples: Annotated[int, Field(ge=2)],
    seed: NonNegativeInt,
) -> Result:
    """Measure loss, perplexity and bits per byte with their standard errors.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch; does not affect results.
        resamples: bootstrap resamples.
        seed: seed of the bootstrap.
    """
    sums_G3 = document_sums(subject, tokens, batch_size)
    nats, counted, num_bytes = sums_G3.sum(0).tolist()
    numbers = {"loss": nats / counted, "ppl": perplexity(nats, int(counted))}
    notes = [f"{int(counted):,} tokens of {len(sums_G3):,} documents."]
    if subject.bytes_of_token_V is None:
        notes.append("No bits per byte: the bytes per token of this tokenizer are unknown.")
    else:
        numbers["bpb"] = bits_per_byte(nats, int(num_bytes))
    nats_R, tokens_R, bytes_R = resampled_sums(sums_G3, resamples, seed).unbind(1)
    loss_R = nats_R / tokens_R
    resampled_R3 = torch.stack([loss_R, loss_R.exp(), nats_R / (math.log(2) * bytes_R)], 1)
    errors = dict(zip(("loss", "ppl", "bpb"), resampled_R3.std(0).tolist(), strict=True))
    record = {
        "definition": DEFINITION,
        "tokens": int(counted),
        "documents": len(sums_G3),
        "metrics": numbers | {f"{name}_se": errors[name] for name in numbers},
    }
    rows = [[name, f"{value:.4f}", f"{errors[name]:.4f}"] for name, value in numbers.items()]
    table = numbers_table("quality on the validation split", ("", "value", "standard error"), rows)
    return Result([table], [*notes, *few_documents_note(len(sums_G3))], record)


def document_sums(
    subject: Subject,
    tokens: int | None,
    batch_size: int,
    steering: Steering | None = None,
    title: str = "quality",
) -> Tensor:
    """Return nats, tokens and bytes of each document in the validation windows, (G, 3), fp64.

    Bytes are 0 if the bytes per token are unknown. `title` labels the progress bar.
    """
    byte_len_V = subject.bytes_of_token_V
    sums_G3 = torch.zeros(len(subject.validation.document_ends), 3, dtype=torch.float64)
    for batch in subject.track_predictions(title, batch_size, tokens, steering):
        targets_N = batch.windows_BT[:, 1:].flatten()
        bytes_N = torch.zeros_like(targets_N) if byte_len_V is None else byte_len_V[targets_N]
        values_N3 = torch.stack([batch.nll_BS.flatten(), torch.ones_like(targets_N), bytes_N], 1).double()
        sums_G3.index_add_(0, batch.documents_BS.flatten().cpu(), values_N3.cpu())
    return sums_G3[sums_G3[:, 1] > 0]


def resampled_sums(values_GC: Tensor, resamples: int, seed: int) -> Tensor:
    """Return the sums over documents in each bootstrap resample, (R, C)."""
    generator, num_documents = torch.Generator().manual_seed(seed), len(values_GC)
    resamples_of_G = (torch.randint(num_documents, (num_documents,), generator=generator) for _ in range(resamples))
    return torch.stack([values_GC[resample_G].sum(0) for resample_G in resamples_of_G])


def few_documents_note(documents: int) -> list[str]:
    """Return a note if the number of documents is too small for the bootstrap."""
    note = f"Standard errors over {documents} documents are too small: use at least {FEW_DOCUMENTS} (raise tokens)."
    return [note] if documents < FEW_DOCUMENTS else []

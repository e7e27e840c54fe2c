"""The analysis `quality`: how well a run predicts its validation split, with standard errors.

Shapes: B sequences, S sequence length, N tokens, G documents, V vocabulary.
"""

import math

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from simbal.analysis.shared.finding import Finding, numbers_table
from simbal.analysis.shared.trained import TrainedRun, check_pass
from simbal.config.values import whole_number
from simbal.metrics import language
from simbal.model.router import Steering

DEFINITION = {
    "loss": "cross-entropy in nats, mean over the tokens of the validation split; no auxiliary loss, no z-loss",
    "ppl": "exp of loss",
    "bpb": "cross-entropy in bits, summed over tokens, by the UTF-8 bytes they stand for",
    "<number>_se": "its standard error: standard deviation over bootstrap resamples of whole documents",
}


def quality(trained: TrainedRun, tokens: int | None, batch_size: int, resamples: int, seed: int) -> Finding:
    """Measure loss, perplexity and bits per byte, each with its standard error.

    Args:
        trained: the run.
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
    sums_G3 = document_sums(trained, tokens, batch_size)
    totals_3 = sums_G3.sum(0)
    spread = bootstrap(sums_G3, resamples, seed)
    nats, counted, num_bytes = (totals_3[0].item(), int(totals_3[1]), int(totals_3[2]))
    numbers = {
        "loss": nats / counted,
        "ppl": language.perplexity(nats, counted),
        "bpb": language.bits_per_byte(nats, num_bytes),
    }
    record = {
        "definition": DEFINITION,
        "tokens": counted,
        "documents": len(sums_G3),
        "metrics": numbers | {f"{name}_se": se for name, se in spread.items()},
    }
    return Finding([_table(numbers, spread)], [f"{counted:,} tokens of {len(sums_G3):,} documents."], record)


def document_sums(
    trained: TrainedRun,
    tokens: int | None,
    batch_size: int,
    steering: Steering | None = None,
    title: str = "quality",  # title of the progress bar
) -> Tensor:
    """Return nats, tokens and bytes of each document that the validation windows touch, (G, 3), fp64."""
    byte_len_V = trained.module.bytes_of_token_V
    sums_G3 = torch.zeros(len(trained.validation.document_ends), 3, dtype=torch.float64)
    batches = track(
        trained.predict(batch_size, tokens, steering), title, trained.num_batches(batch_size, tokens), transient=True
    )
    for batch in batches:
        targets_N = batch.windows_BT[:, 1:].flatten()
        values_N3 = torch.stack([batch.nll_BS.flatten(), torch.ones_like(targets_N), byte_len_V[targets_N]], 1).double()
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


def _table(numbers: dict[str, float], spread: dict[str, float]) -> Table:
    rows = ([name, f"{value:.4f}", f"{spread[name]:.4f}"] for name, value in numbers.items())
    return numbers_table("quality on the validation split", ("", "value", "standard error"), rows)

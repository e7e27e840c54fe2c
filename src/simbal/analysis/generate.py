"""The analysis `generate`: text that a model writes.

Shapes: B samples, S tokens so far, T drawn tokens, Q new tokens of a pass, N tokens, E experts, V ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result
from simbal.analysis.subject import Subject, TextTokenizer
from simbal.config.values import not_negative, whole_number
from simbal.errors import UserError
from simbal.files.console import new_grid
from simbal.model.attention import KeyValueCache
from simbal.model.router import Candidates, Steering, SteeringWrapper
from simbal.model.transformer import Transformer

DEFINITION = {
    "nll": "-log p of the drawn tokens at temperature 1, in nats, mean over the tokens of all samples",
    "ended": "share of the samples that came to an end of text",
    "sample": "starts after an end of text and the prompt; ends at the next end of text, or after `tokens` tokens",
}


@dataclass(frozen=True)
class Drawing:
    """The settings by which tokens are drawn; `temperature` 0 takes the most probable one."""

    temperature: float
    top_p: float
    seed: int

    def uniform_numbers(self, samples: int, tokens: int) -> Tensor:
        """Return numbers (B, T) in [0, 1).

        A sample is the same however many there are, and a shorter one is a longer one's start.
        """
        rows = [np.random.Generator(np.random.PCG64([self.seed, sample])).random(tokens) for sample in range(samples)]
        return torch.from_numpy(np.stack(rows))

    def draw(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """Return ids (B,): the token at `uniform_B` of the probability mass that is kept, most probable tokens first.

        Kept are the fewest tokens whose probabilities, at this temperature, sum to at least `top_p`.
        """
        if self.temperature == 0:
            return logits_BV.argmax(1)
        # less its largest value first: a tiny temperature must not make infinities of it
        shifted_BV = logits_BV.double() - logits_BV.amax(1, keepdim=True)
        probs_BV, ids_BV = (shifted_BV / self.temperature).softmax(1).sort(dim=1, descending=True, stable=True)
        reached_BV = probs_BV.cumsum(1)
        before_BV = reached_BV - probs_BV
        kept_BV = (before_BV < self.top_p).double() * probs_BV
        place_BV = kept_BV.cumsum(1)
        target_B1 = uniform_B[:, None] * place_BV[:, -1:]
        place_B1 = torch.searchsorted(place_BV, target_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
        return ids_BV.gather(1, place_B1)[:, 0]


@dataclass(frozen=True)
class Sample:
    """One continuation; `ids` without the prompt, and without the end of text if it came to one."""

    ids: list[int]
    text: str
    ended: bool
    nll: list[float]  # of each drawn token, the end of text included


def generate(
    subject: Subject, prompt: str, tokens: int, samples: int, temperature: float, top_p: float, seed: int
) -> Result:
    """Draw samples, print and store them.

    Args:
        subject: the model; a run on symbols (data=synthetic) has no text.
        prompt: where the text starts; empty: after an end of text alone.
        tokens: at most drawn for each sample; with the prompt no more than the model reads at once.
        samples: how many continuations.
        temperature: the logits are divided by it; 0: the most probable token, always.
        top_p: the share of the probability from which is drawn, most probable tokens first; 1: all of it.
        seed: of the draws.

    Raises:
        UserError: a key is out of its range, or the model cannot write such a text.
    """
    drawing = _checked(prompt, tokens, samples, temperature, top_p, seed)
    tokenizer = subject.tokenizer()
    given = [int(token) for token in tokenizer.encode(prompt.encode())] if prompt else []
    longest = subject.seq_len
    if len(given) + tokens > longest:  # the model reads the end of text before, and not the last token that is drawn
        raise UserError(
            f"analysis.generate.tokens={tokens} after a prompt of {len(given)} tokens is longer than the {longest} "
            f"tokens that {subject.reads}: at most {max(0, longest - len(given))} fit"
        )
    prompt_BS = torch.tensor([[tokenizer.eot, *given]] * samples, device=subject.device)
    possible_V = torch.from_numpy(tokenizer.drawable_V)
    with subject.inference():
        ids_BT, nll_BT = continue_tokens(subject.decoder(), prompt_BS, tokens, drawing, possible_V)
    found = [_sample(tokenizer, *each) for each in zip(ids_BT.tolist(), nll_BT.tolist(), strict=True)]
    return Result([_table(prompt, found)], _notes(drawing), _record(prompt, found, seed))


@torch.inference_mode()
def continue_tokens(
    logits_after: Callable[[Tensor], Tensor], prompt_BS: Tensor, tokens: int, drawing: Drawing, possible_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw ids (B, T) after the prompts, one by one, and return them with -log p of each, (B, T).

    -log p is in nats at temperature 1, over the ids that can be drawn, which are those in `possible_V`.
    `logits_after` is given the next ids of the samples, (B, Q), and returns the logits (B, V) after the last of them.
    """
    uniform_BT = drawing.uniform_numbers(len(prompt_BS), tokens)
    ids, nlls, next_BQ = [], [], prompt_BS
    for step in range(tokens):
        logits_BV = logits_after(next_BQ).float().cpu().masked_fill(~possible_V, -torch.inf)
        ids_B = drawing.draw(logits_BV, uniform_BT[:, step])
        nlls.append(-logits_BV.log_softmax(1).gather(1, ids_B[:, None])[:, 0])
        ids.append(ids_B)
        next_BQ = ids_B[:, None].to(prompt_BS.device)
    return torch.stack(ids, 1), torch.stack(nlls, 1)


class WholePrefix(SteeringWrapper):
    """A `Steering` around another that sees what every token so far had, and chooses for the new ones.

    With this even a choice by a hash of the sequence so far is that of a forward pass over the whole sequence, as long
    as a later token cannot change an earlier one's experts, which in evaluation holds for every strategy.
    """

    def __init__(self, strategy: Steering, cache: KeyValueCache) -> None:
        """Wrap `strategy`; `cache` holds the tokens of the same forward passes."""
        self.strategy, self.cache = strategy, cache
        self._past: dict[int, Tensor] = {}  # (2, B, S, E) of each layer: logits and probabilities

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the last Q rows of each sequence's scores, (B*Q, E)."""
        num_sequences, new = candidates.tokens_BS.shape
        new_2NE = torch.stack([candidates.logits_NE, candidates.probs_NE])
        new_2BQE = new_2NE.view(2, num_sequences, new, -1)
        past_2BSE = self._past.get(candidates.layer)
        all_2BSE = new_2BQE if past_2BSE is None else torch.cat([past_2BSE, new_2BQE], 2)
        self._past[candidates.layer] = all_2BSE
        logits_NE, probs_NE = all_2BSE.flatten(1, 2)
        assert self.cache.tokens_BS is not None, "the model appends the tokens before it routes them"
        whole = Candidates(candidates.layer, self.cache.tokens_BS, logits_NE, probs_NE, candidates.top_k)
        scores_NE = self.strategy.choice_scores(whole)
        return scores_NE.reshape(num_sequences, -1, scores_NE.shape[1])[:, -new:].flatten(0, 1)


def decoder_of(model: Transformer, steering: Steering) -> Callable[[Tensor], Tensor]:
    """Return a function that is given the next ids (B, Q), and returns the logits (B, V) after the last of them."""
    cache = KeyValueCache(model.shape.num_layers)
    whole = WholePrefix(steering, cache)

    def logits(next_BQ: Tensor) -> Tensor:
        hidden_BQD, _ = model(next_BQ, whole, cache)
        logits_BV: Tensor = hidden_BQD[:, -1] @ model.head_VD.T
        return logits_BV

    return logits


def harmless(text: str) -> str:
    """Return `text` with every unprintable character spelt as an escape, but for ends of lines and tabs.

    Control characters can move a terminal's cursor, format characters can turn the writing direction.
    """
    return "".join(
        sign if sign in "\n\t" or sign.isprintable() else sign.encode("unicode_escape", "surrogatepass").decode()
        for sign in text
    )


def _checked(prompt: str, tokens: int, samples: int, temperature: float, top_p: float, seed: int) -> Drawing:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("analysis.generate.prompt is no valid UTF-8") from None
    for key, value, least in (("tokens", tokens, 1), ("samples", samples, 1), ("seed", seed, 0)):
        whole_number(f"analysis.generate.{key}", value, least)
    temperature = not_negative("analysis.generate.temperature", temperature)
    top_p = not_negative("analysis.generate.top_p", top_p)
    if not 0 < top_p <= 1:
        raise UserError(f"analysis.generate.top_p={top_p} must be above 0 and at most 1")
    return Drawing(temperature, top_p, seed)


def _sample(tokenizer: TextTokenizer, ids: list[int], nll: list[float]) -> Sample:
    ended = tokenizer.eot in ids
    length = ids.index(tokenizer.eot) if ended else len(ids)
    return Sample(ids[:length], tokenizer.decode(ids[:length]), ended, nll[: length + ended])


def _table(prompt: str, found: list[Sample]) -> Table:
    grid = new_grid("generated text")
    grid.add_column("sample", justify="right")
    grid.add_column("«prompt» and what follows", overflow="fold")
    grid.add_column("ends with")
    grid.show_lines = True
    for number, sample in enumerate(found):
        ending = "end of text" if sample.ended else f"{len(sample.ids)} tokens"
        grid.add_row(str(number), f"«{harmless(prompt)}»{harmless(sample.text)}", ending)
    return grid


def _notes(drawing: Drawing) -> list[str]:
    if drawing.temperature == 0:
        return ["The most probable token each time: all samples are the same."]
    return [f"Drawn at temperature {drawing.temperature:g}, top_p {drawing.top_p:g}, seed {drawing.seed}."]


def _record(prompt: str, found: list[Sample], seed: int) -> dict[str, Any]:
    nll = [value for sample in found for value in sample.nll]
    return {
        "definition": DEFINITION,
        "prompt": prompt,
        "seed": seed,
        "tokens": len(nll),
        "samples": [{"text": each.text, "ids": each.ids, "ended": each.ended} for each in found],
        "metrics": {
            "nll": sum(nll) / len(nll),
            "ended": sum(sample.ended for sample in found) / len(found),
        },
    }

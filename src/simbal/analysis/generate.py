"""The analysis `generate`: text sampled from a model.

Shapes: B samples, S tokens so far, T sampled tokens, Q new tokens in a pass, N tokens, E experts, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from simbal.analysis.result import Result
from simbal.analysis.subject import Subject
from simbal.console import new_grid
from simbal.errors import UserError
from simbal.model.attention import KeyValueCache
from simbal.model.router import Candidates, Steering, SteeringWrapper
from simbal.model.transformer import Transformer

DEFINITION = {
    "nll": "-log p of the sampled tokens at temperature 1, in nats, mean over the tokens of all samples",
    "ended": "share of the samples that reached the end of a text",
    "sample": "starts after an end of text and the prompt; stops at the next end of text, or after `tokens` tokens",
}


@dataclass(frozen=True)
class Sampler:
    """Samples tokens from logits. `temperature` 0 takes the most probable token."""

    temperature: float
    top_p: float
    seed: int

    def uniform_numbers(self, samples: int, tokens: int) -> Tensor:
        """Return random numbers (B, T) in [0, 1), one generator per sample.

        A sample does not depend on the number of samples, and a shorter one is a prefix of a longer one.
        """
        rows = [np.random.Generator(np.random.PCG64([self.seed, sample])).random(tokens) for sample in range(samples)]
        return torch.from_numpy(np.stack(rows))

    def sample(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """Return ids (B,) by inverting the cumulative distribution at `uniform_B`, most probable tokens first.

        The distribution is limited to the fewest tokens whose probabilities sum to at least `top_p`.
        """
        if self.temperature == 0:
            return logits_BV.argmax(1)
        # subtract the maximum first, because dividing by a tiny temperature may overflow
        shifted_BV = logits_BV.double() - logits_BV.amax(1, keepdim=True)
        probs_BV, ids_BV = (shifted_BV / self.temperature).softmax(1).sort(dim=1, descending=True, stable=True)
        before_BV = probs_BV.cumsum(1) - probs_BV
        kept_BV = (before_BV < self.top_p).double() * probs_BV
        cumulative_BV = kept_BV.cumsum(1)
        target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
        index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
        return ids_BV.gather(1, index_B1)[:, 0]


def generate(
    subject: Subject,
    prompt: str,
    tokens: PositiveInt,
    samples: PositiveInt,
    temperature: NonNegativeFloat,
    top_p: Annotated[float, Field(gt=0, le=1)],
    seed: NonNegativeInt,
) -> Result:
    """Sample continuations of a prompt.

    Args:
        subject: the model.
        prompt: start of the text; if empty, start after an end of text.
        tokens: maximum tokens per sample. Prompt and sample must fit in the sequence length.
        samples: number of continuations.
        temperature: divides the logits; 0: always take the most probable token.
        top_p: share of the probability to sample from, most probable tokens first.
        seed: seed of the sampling.

    Raises:
        UserError: the model has no text, or the text is longer than its sequence length.
    """
    tokenizer = subject.tokenizer()
    prompt_ids = [int(token) for token in tokenizer.encode(prompt.encode())] if prompt else []
    # the model reads the end of a text before the prompt, but not the last sampled token
    if len(prompt_ids) + tokens > subject.seq_len:
        raise UserError(
            f"analysis.generate.tokens={tokens} must be at most {max(0, subject.seq_len - len(prompt_ids))} after a "
            f"prompt of {len(prompt_ids)} tokens: {subject.reads} {subject.seq_len} tokens"
        )
    sampler = Sampler(temperature, top_p, seed)
    prompt_BS = torch.tensor([[tokenizer.eot, *prompt_ids]] * samples, device=subject.device)
    allowed_V = torch.from_numpy(tokenizer.can_generate_V)
    with subject.inference():
        ids_BT, nll_BT = continue_tokens(subject.decoder(), prompt_BS, tokens, sampler, allowed_V)
    texts, nlls = [], []
    table = new_grid("generated text")
    table.add_column("sample", justify="right")
    table.add_column("«prompt» and continuation", overflow="fold")
    table.add_column("ends with")
    table.show_lines = True
    for number, (ids, nll) in enumerate(zip(ids_BT.tolist(), nll_BT.tolist(), strict=True)):
        ended = tokenizer.eot in ids
        length = ids.index(tokenizer.eot) if ended else len(ids)
        text = tokenizer.decode(ids[:length])
        texts.append({"text": text, "ids": ids[:length], "ended": ended})
        nlls += nll[: length + ended]
        ending = "end of text" if ended else f"{length} tokens"
        table.add_row(str(number), f"«{escape_control_characters(prompt)}»{escape_control_characters(text)}", ending)
    record = {
        "definition": DEFINITION,
        "prompt": prompt,
        "seed": seed,
        "tokens": len(nlls),
        "samples": texts,
        "metrics": {"nll": sum(nlls) / len(nlls), "ended": sum(text["ended"] for text in texts) / samples},
    }
    note = f"Sampled with temperature {temperature:g}, top_p {top_p:g}, seed {seed}."
    if temperature == 0:
        note = "temperature=0 takes the most probable token, so all samples are identical."
    return Result([table], [note], record)


@torch.inference_mode()
def continue_tokens(
    decoder: Callable[[Tensor], Tensor], prompt_BS: Tensor, tokens: int, sampler: Sampler, allowed_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample ids (B, T) after the prompts, and return them with their -log p (B, T).

    -log p is in nats at temperature 1, over the ids in `allowed_V`. `decoder` takes the next ids (B, Q) and returns the
    logits (B, V) after the last of them.
    """
    uniform_BT = sampler.uniform_numbers(len(prompt_BS), tokens)
    ids, nlls, next_BQ = [], [], prompt_BS
    for step in range(tokens):
        logits_BV = decoder(next_BQ).float().cpu().masked_fill(~allowed_V, -torch.inf)
        ids_B = sampler.sample(logits_BV, uniform_BT[:, step])
        nlls.append(-logits_BV.log_softmax(1).gather(1, ids_B[:, None])[:, 0])
        ids.append(ids_B)
        next_BQ = ids_B[:, None].to(prompt_BS.device)
    return torch.stack(ids, 1), torch.stack(nlls, 1)


class PrefixSteering(SteeringWrapper):
    """A `Steering` for decoding with a cache: `strategy` sees all tokens so far and scores the new ones.

    Choices that depend on earlier tokens, such as a hash of the prefix, are then the same as in a forward pass over the
    whole sequence. Later tokens must not affect earlier ones, which holds for every strategy in evaluation mode.
    """

    def __init__(self, strategy: Steering, cache: KeyValueCache) -> None:
        """Wrap `strategy`; `cache` must belong to the same forward passes."""
        self.strategy, self.cache = strategy, cache
        self._past: dict[int, Tensor] = {}  # logits and probabilities of each layer, (2, B, S, E)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores of the last Q tokens of each sequence, (B*Q, E)."""
        num_sequences, new = candidates.tokens_BS.shape
        new_2NE = torch.stack([candidates.logits_NE, candidates.probs_NE])
        new_2BQE = new_2NE.view(2, num_sequences, new, -1)
        past_2BSE = self._past.get(candidates.layer)
        all_2BSE = new_2BQE if past_2BSE is None else torch.cat([past_2BSE, new_2BQE], 2)
        self._past[candidates.layer] = all_2BSE
        logits_NE, probs_NE = all_2BSE.flatten(1, 2)
        assert self.cache.tokens_BS is not None, "the model appends tokens to the cache before it routes them"
        prefix = Candidates(candidates.layer, self.cache.tokens_BS, logits_NE, probs_NE, candidates.top_k)
        scores_NE = self.strategy.choice_scores(prefix)
        return scores_NE.reshape(num_sequences, -1, scores_NE.shape[1])[:, -new:].flatten(0, 1)


def cached_decoder(model: Transformer, strategy: Steering) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the next ids (B, Q) and returns the logits (B, V) after the last of them."""
    cache = KeyValueCache(model.shape.num_layers)
    steering = PrefixSteering(strategy, cache)

    def logits(next_BQ: Tensor) -> Tensor:
        hidden_BQD, _ = model(next_BQ, steering, cache)
        logits_BV: Tensor = hidden_BQD[:, -1] @ model.head_VD.T
        return logits_BV

    return logits


def escape_control_characters(text: str) -> str:
    """Escape unprintable characters except newlines and tabs, because they can move a terminal's cursor."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )

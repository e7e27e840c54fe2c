"""Text that a trained run writes.

Shapes: B samples, S tokens of the prompt, T drawn tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from simbal.analysis.finding import Finding
from simbal.analysis.run_tokenizer import run_tokenizer
from simbal.analysis.sampling import Drawing, continue_tokens
from simbal.analysis.trained import TrainedRun
from simbal.checks import not_negative, whole_number
from simbal.console import new_grid
from simbal.data.tokenizer import Tokenizer
from simbal.errors import UserError

DEFINITION = {
    "nll": "-log p of the drawn tokens at temperature 1, in nats, mean over the tokens of all samples",
    "ended": "share of the samples that came to an end of text",
    "sample": "starts after an end of text and the prompt; ends at the next end of text, or after `tokens` tokens",
}


@dataclass(frozen=True)
class Sample:
    """One continuation; `ids` without the prompt, and without the end of text if it came to one."""

    ids: list[int]
    text: str
    ended: bool
    nll: list[float]  # of each drawn token, the end of text included


def generate(
    trained: TrainedRun, prompt: str, tokens: int, samples: int, temperature: float, top_p: float, seed: int
) -> Finding:
    """Samples, printed and stored.

    Args:
        trained: the run; one on symbols (data=synthetic) has no text.
        prompt: where the text starts; empty: after an end of text alone.
        tokens: at most drawn for each sample; with the prompt no more than the run was trained on at once.
        samples: how many continuations.
        temperature: the logits are divided by it; 0: the most probable token, always.
        top_p: the share of the probability from which is drawn, most probable tokens first; 1: all of it.
        seed: of the draws.

    Raises:
        UserError: a key is out of its range, or the run cannot write such a text.
    """
    drawing = _checked(prompt, tokens, samples, temperature, top_p, seed)
    tokenizer = run_tokenizer(trained)
    given = [int(token) for token in tokenizer.encode(prompt.encode())] if prompt else []
    longest = trained.spec.config["data"]["seq_len"]
    if len(given) + tokens > longest:  # the model reads the end of text before, and not the last token that is drawn
        raise UserError(
            f"analysis.generate.tokens={tokens} after a prompt of {len(given)} tokens is longer than the {longest} "
            f"tokens that the run was trained on: at most {max(0, longest - len(given))} fit"
        )
    prompt_BS = torch.tensor([[tokenizer.eot, *given]] * samples, device=trained.device)
    possible_V = torch.from_numpy(tokenizer.byte_len > 0)
    possible_V[tokenizer.eot] = True
    with trained.inference():
        ids_BT, nll_BT = continue_tokens(
            trained.model, trained.module.balancing, prompt_BS, tokens, drawing, possible_V
        )
    found = [_sample(tokenizer, *each) for each in zip(ids_BT.tolist(), nll_BT.tolist(), strict=True)]
    return Finding([_table(prompt, found)], _notes(drawing), _record(prompt, found, seed))


def _checked(prompt: Any, tokens: Any, samples: Any, temperature: Any, top_p: Any, seed: Any) -> Drawing:
    if not isinstance(prompt, str):
        raise UserError(f"analysis.generate.prompt={prompt} must be a text: quote it, \"'{prompt}'\"")
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


def _sample(tokenizer: Tokenizer, ids: list[int], nll: list[float]) -> Sample:
    ended = tokenizer.eot in ids
    length = ids.index(tokenizer.eot) if ended else len(ids)
    text = tokenizer.encoding.decode(ids[:length], errors="replace")  # bytes that are no UTF-8: U+FFFD
    return Sample(ids[:length], text, ended, nll[: length + ended])


def harmless(text: str) -> str:
    """`text` with every character that is not printable spelt as an escape, but for ends of lines and tabs.

    Control characters can move a terminal's cursor, format characters can turn the writing direction.
    """
    return "".join(
        character
        if character in "\n\t" or character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


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

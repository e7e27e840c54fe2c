"""A trained run as a model of lm-evaluation-harness, which asks for log-likelihoods and does all the scoring.

Reference: https://github.com/EleutherAI/lm-evaluation-harness; importing this module takes the extra `eval`.
"""

from typing import Any

from lm_eval.api.model import TemplateLM
from rich.progress import track

from simbal.analysis.likelihood import Ending, endings
from simbal.analysis.trained import TrainedRun
from simbal.data.tokenizer import Tokenizer

ONLY_CHOICES = "every task of downstream is a choice between continuations"


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods of given continuations; it generates nothing."""

    def __init__(self, trained: TrainedRun, tokenizer: Tokenizer, batch_size: int) -> None:
        super().__init__()
        self.trained, self.text_tokenizer, self.batch_size = trained, tokenizer, batch_size

    @property
    def eot_token_id(self) -> int:
        """What stands before a continuation without context."""
        return self.text_tokenizer.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids without special tokens: text that spells one stays text."""
        return [int(token) for token in self.text_tokenizer.encode(string.encode())] if string else []

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As the harness does it, without its progress bar."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        trained, found = self.trained, [Ending(0.0, True)] * len(requests)
        pairs = [(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests]
        seq_len = trained.spec.config["data"]["seq_len"]
        with trained.inference():
            answers = endings(trained.model, trained.module.balancing, pairs, seq_len, self.batch_size)
            for place, ending in track(answers, "downstream", len(requests), transient=True):
                found[place] = ending
        return [(ending.log_p, ending.greedy) for ending in found]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The harness wants it declared; no task of `downstream` asks for it."""
        raise AssertionError(ONLY_CHOICES)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """The harness wants it declared; no task of `downstream` asks for it."""
        raise AssertionError(ONLY_CHOICES)

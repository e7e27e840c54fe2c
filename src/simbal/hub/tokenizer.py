"""The tokenizer of a run in Hugging Face's format, made by the converter that transformers has for tiktoken.

Its regular expressions are Oniguruma's, tiktoken's are those of the Rust crate fancy-regex: one construct of our
pattern means something else there. The tests compare the ids of both over characters, words and source code.
Reference: TikTokenConverter in transformers 5.23; Oniguruma, doc/RE.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simbal.data.tokenizer import PATTERN, Tokenizer
from simbal.errors import UserError

END_OF_TEXT = "<|endoftext|>"
OURS, THEIRS = r"\p{N}{1,3}+|", r"\p{N}{1,3}|"  # there {1,3}+ is no possessive repetition, but a repetition of one


def oniguruma_pattern() -> str:
    """How the text is cut before its pieces are encoded."""
    assert PATTERN.count(OURS) == 1, "the pattern of simbal.data.tokenizer has changed"
    return PATTERN.replace(OURS, THEIRS)


def require_converter() -> None:
    """`UserError` if transformers is not installed, which brings the converter."""
    if find_spec("transformers") is None:
        raise UserError("the run's tokenizer is converted by transformers: pip install 'simbal[export]'")


def write_tokenizer(tokenizer: Tokenizer, seq_len: int, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json for AutoTokenizer.

    As in training, nothing is put before or after a text, and text that spells a special token stays text.
    """
    _converted(tokenizer).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that transformers 4 knows as well
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _converted(tokenizer: Tokenizer) -> Any:
    """A `tokenizers.Tokenizer`; ids without a rank below end of text (one in the whole cl100k_base) get a name."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    unused = [f"<|unused_{rank}|>" for rank in range(len(tokenizer.ranks), tokenizer.eot)]
    converter: Any = TikTokenConverter(  # type: ignore[no-untyped-call]
        pattern=oniguruma_pattern(), extra_special_tokens=[*unused, END_OF_TEXT]
    )
    # its own reader wants a file, and keeps a copy under the file's name in the temporary folder
    converter.load_tiktoken_bpe = lambda _: tokenizer.ranks
    return converter.converted()

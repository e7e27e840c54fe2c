"""The text that a host model is measured on: the validation split of a source, by the model's own tokenizer."""

from typing import Any

from simbal.config.compose import checked_data
from simbal.config.schema import DATA, DataConfig
from simbal.data.hub_tokenizer import HubTokenizer
from simbal.data.loader import ValidationSplit
from simbal.data.store import Store, prepare
from simbal.errors import UserError


def text_config(keys: Any) -> DataConfig:
    """Return the typed group `data` of a command that measures a model; `UserError` unless it is a source of text."""
    if not isinstance(keys, dict) or keys.get("source") is None:
        raise UserError(f"hf= needs the text to measure it on: give data=NAME, one of {', '.join(_with_text())}")
    own = DATA.get(keys["source"], DataConfig).model_fields
    for key, value in keys.items():
        if key not in own and value is not None:
            raise UserError(f"data.{key}= is not for data={keys['source']}: leave it out")
    data = checked_data({key: value for key, value in keys.items() if key in own})
    if data.source not in _with_text():
        raise UserError(f"data={data.source} has no text: hf= takes {', '.join(_with_text())}")
    return data


def held_out_text(data: DataConfig, tokenizer: HubTokenizer) -> Store:
    """Return the store of the validation split in the model's own tokens, prepared if it is not there yet."""
    return prepare(data.model_copy(update={"vocab_size": tokenizer.vocab_size}), progress=True, encoder=tokenizer)


def windows(store: Store, data: DataConfig, context: int) -> ValidationSplit:
    """Return the validation split in windows of `context` tokens; `UserError` if it does not fill one."""
    split = ValidationSplit.of(store, context, data.seed or 0, data.validation_document_tokens)
    if not len(split.whole):
        held = len(store.tokens("validation"))
        raise UserError(
            f"the validation split of data={data.source} holds {held:,} tokens, fewer than context={context}"
        )
    return split


def _with_text() -> list[str]:
    return [name for name in DATA if name != "synthetic"]

"""The tokenizer that a run's text went through."""

from simbal.analysis.trained import TrainedRun
from simbal.data.tokenizer import Tokenizer, load_tokenizer
from simbal.errors import UserError


def run_tokenizer(trained: TrainedRun) -> Tokenizer:
    """Text to ids and back; `UserError` for a run on symbols."""
    data = trained.spec.config["data"]
    if data["source"] == "synthetic":
        raise UserError(f"{trained.path} was trained on data=synthetic, whose symbols stand for no text")
    return load_tokenizer(data["vocab_size"], data["tokenizer_path"])

"""Writes finished runs as folders in Hugging Face's format, with their tokenizer and a model card.

Shapes: B sequences, S sequence length, N = B*S tokens, E experts.
"""

import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from simbal.analysis.trained import FINAL, finished, runs_in, weights_of
from simbal.balancing.composition import Composition
from simbal.data.store import open_encoder
from simbal.data.tokenizer import PATTERN, Tokenizer
from simbal.errors import UserError
from simbal.files.console import console
from simbal.hf.card import model_card
from simbal.hf.convert import CONFIG, SINGLE, Architecture, architecture, config_json, read_json, views
from simbal.model.init import generator, init_router
from simbal.model.router import Candidates, apply_gating
from simbal.model.transformer import Transformer
from simbal.runs.spec import RunSpec, result_keys
from simbal.training.build import build_strategies, transformer_shape

NO_TOKENIZER = "There is none: the run was trained on data=synthetic, whose symbols stand for no text."
TOKENIZER = (
    "AutoTokenizer reads it: cl100k_base, whole or cut to its first ids; {vocab_size:,} ids, of which {eot} is end of "
    "text. Nothing is put before or after a text; in training an end of text stood after every document."
)
FACTS = "simbal.json"  # what is known of the run
FILES = {"README.md", CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", SINGLE, FACTS}
END_OF_TEXT = "<|endoftext|>"
OURS, THEIRS = r"\p{N}{1,3}+|", r"\p{N}{1,3}|"  # there {1,3}+ is no possessive repetition, but a repetition of one


@dataclass(frozen=True)
class FinishedRun:
    """A finished run; its model has the final weights, in fp32, on the CPU. Its data need not be there."""

    path: Path
    spec: RunSpec
    record: dict[str, Any]
    model: Transformer


def export(run: str | None, to: str | None, overwrite: bool, tokenizer_path: str | None = None) -> None:
    """Write a run to the folder `to`, or each finished run of a folder of runs to `to`/<its name>.

    `tokenizer_path` is the user's, None for the default paths: the one in a run's config is never read, as anybody may
    have written it.

    Raises:
        UserError: a run is unfinished or damaged, or no architecture can express it, or the folder is taken; of a
            folder of runs the others are exported all the same.
    """
    if not run or not to:
        raise UserError("give run=outputs/<name>/<run> and to=FOLDER")
    path, target = Path(run), Path(to).resolve()
    runs, refused = runs_in(path), 0
    if runs == [path]:
        export_run(path, target, overwrite, tokenizer_path)
        return
    for each in runs:
        try:
            export_run(each, target / each.name, overwrite, tokenizer_path)
        except UserError as error:
            refused += 1
            console().print(f"not exported: {error}", soft_wrap=True)
    if refused:
        raise UserError(f"{refused} of the {len(runs)} finished runs in {path} could not be exported")


def export_run(path: Path, target: Path, overwrite: bool, tokenizer_path: str | None) -> None:
    """Write one run to one folder; everything is checked before anything is written."""
    run, out = read_run(path), console()
    data = run.spec.config.data
    require_free(target, run.spec.hash, overwrite)
    encoder = open_encoder(data.model_copy(update={"tokenizer_path": tokenizer_path}))
    tokenizer = encoder if isinstance(encoder, Tokenizer) else None
    if tokenizer and find_spec("transformers") is None:
        raise UserError("the run's tokenizer is converted by transformers: pip install 'simbal[export]'")
    sentence = TOKENIZER.format(vocab_size=tokenizer.vocab_size, eot=tokenizer.eot) if tokenizer else NO_TOKENIZER
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(run, tokenizer, encoder.eot, sentence, part)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {target}: {reason}; free some space, or choose another to=") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    out.print(f"written: {target}, a {architecture(run.model.shape).class_name} of {path}", soft_wrap=True)
    out.print(f"tokenizer: {sentence}", soft_wrap=True)
    if data.source in ("files", "dclm"):
        out.print(f"README.md and {FACTS} name the files of its data: look at them before you publish", soft_wrap=True)


def read_run(path: Path) -> FinishedRun:
    """Return the run in a folder; `UserError` unless it is finished and transformers can compute its model."""
    spec, record = finished(path)
    shape = transformer_shape(spec, end_of_text=0)  # only a document mask needs it, and that is refused
    try:
        theirs = architecture(shape)
        balancing = build_strategies(spec, shape)
        if shape.num_experts:
            require_unsteered(balancing, theirs, shape.num_layers, shape.num_experts, shape.top_k)
    except UserError as error:
        raise UserError(f"{path} cannot be exported, for its {error}") from None
    model = Transformer(shape, "reference" if shape.num_experts else None)
    for router in model.routers:  # rows that a strategy can parametrise; the checkpoint replaces them
        init_router(router.weight_ED, "normal_unit", 1.0, generator(0, "router"))
    balancing.prepare(model.routers)
    module = nn.ModuleDict({"model": model, "balancing": balancing})  # the names that LitMoE gives the two
    module.load_state_dict(weights_of(path / "checkpoints" / FINAL, spec.hash))
    return FinishedRun(path, spec, record, model.eval())


@torch.no_grad()
def require_unsteered(
    balancing: Composition, theirs: Architecture, num_layers: int, num_experts: int, top_k: int
) -> None:
    """Raise `UserError` if a strategy changes a router's logits or choice in evaluation mode.

    It may do so in training. One that changes nothing returns the very logits that it was given.
    """
    logits_NE, tokens_BS = torch.zeros(1, num_experts), torch.zeros(1, 1, dtype=torch.int64)
    if balancing.mapper is not None:
        raise UserError(
            f"balancing.{balancing.mapper} maps hidden states to logits: {theirs.name} multiplies them by a matrix"
        )
    for name, part in balancing.eval().parts.items():
        if part.adjust_logits(logits_NE) is not logits_NE:
            raise UserError(f"balancing.{name} adjusts the router's logits: {theirs.name} gates them as they are")
        for layer in range(num_layers):
            candidates = Candidates(layer, tokens_BS, logits_NE, apply_gating(logits_NE, "softmax"), top_k)
            if part.choice_scores(candidates) is not logits_NE:
                raise UserError(
                    f"balancing.{name} steers the choice of experts: {theirs.name} takes those of the largest logits"
                )


def require_free(target: Path, config_hash: str, overwrite: bool) -> None:
    """Raise `UserError` unless an export of the run with this hash may be written there.

    It may replace an earlier one of the same run, with `overwrite` one of another; files that no export writes are
    never removed.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: choose another to=")
    names = {file.name for file in target.iterdir()} if target.exists() else set()
    if foreign := sorted(names - FILES):
        raise UserError(f"{target} holds {foreign[0]!r}, which is no file of an export: choose another to=")
    same = FACTS in names and read_json(target / FACTS).get("config_hash") == config_hash
    if names and not overwrite and not same:
        raise UserError(
            f"{target} holds something other than an export of this run: choose another to=, or overwrite=true"
        )


def write_tokenizer(tokenizer: Tokenizer, seq_len: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer.

    As in training, nothing is put before or after a text, and text that spells a special token stays text. Ids without
    a rank below end of text (one in the whole cl100k_base) get a name.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    assert PATTERN.count(OURS) == 1, "the pattern of simbal.data.tokenizer has changed"
    unused = [f"<|unused_{rank}|>" for rank in range(len(tokenizer.ranks), tokenizer.eot)]
    pattern = PATTERN.replace(OURS, THEIRS)  # in Oniguruma's syntax
    converter: Any = TikTokenConverter(pattern=pattern, extra_special_tokens=[*unused, END_OF_TEXT])
    # its own reader wants a file, and keeps a copy under the file's name in the temporary folder
    converter.load_tiktoken_bpe = lambda _: tokenizer.ranks
    converter.converted().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that transformers 4 knows as well
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write(run: FinishedRun, tokenizer: Tokenizer | None, eot: int, sentence: str, folder: Path) -> None:
    """Write all files of an export; `sentence` is the card's on the tokenizer."""
    seq_len = run.spec.config.data.seq_len
    weights = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views(run.model).items()}
    save_file(weights, folder / SINGLE, {"format": "pt"})
    _write_json(folder / CONFIG, config_json(run.model.shape, seq_len, eot))
    _write_json(folder / "generation_config.json", {"bos_token_id": eot, "eos_token_id": eot})
    if tokenizer:
        write_tokenizer(tokenizer, seq_len, folder)
    facts = {"config_hash": run.spec.hash, "config": result_keys(run.spec.written), "record": run.record}
    _write_json(folder / FACTS, facts)
    card = model_card(run.path, run.spec, run.record, run.model, sentence)
    (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

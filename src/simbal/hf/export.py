"""Export of finished runs as Hugging Face folders, with a tokenizer and a model card.

Shapes: B sequences, S sequence length, N = B*S tokens, E experts.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from simbal.analysis.trained import find_runs, read_finished_run, read_weights
from simbal.balancing.composition import Composition
from simbal.console import console
from simbal.cost import count_parameters
from simbal.data.prepare import open_encoder
from simbal.data.tokenizer import PATTERN, Tokenizer
from simbal.errors import UserError
from simbal.hf.convert import CONFIG, SINGLE, architecture_of, hf_config, named_weights, require_transformers
from simbal.model.init import generator, init_router
from simbal.model.router import Candidates, apply_gating
from simbal.model.transformer import Transformer
from simbal.runs.spec import RunSpec, result_keys
from simbal.training.build import build_strategies, transformer_shape
from simbal.training.checkpoint import FINAL

NO_TOKENIZER = "None: the run was trained on data=synthetic, whose tokens do not represent text."
TOKENIZER = (
    "Load it with AutoTokenizer: cl100k_base, possibly truncated, with {vocab_size:,} token ids; {eot} is end of text. "
    "The tokenizer adds no special tokens; in training, every document ended with the end-of-text token."
)
FACTS = "simbal.json"  # config and results of the run
FILES = {"README.md", CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", SINGLE, FACTS}
PLACES = ("data.files", "data.validation_files", "data.location")  # config keys with paths, which are not published
PUBLISHED = ("objective", "steps", "tokens", "precision", "versions", "code", "metrics", "definitions")  # of the record
END_OF_TEXT = "<|endoftext|>"
# the tokenizers library reads {1,3}+ as a repetition of {1,3}, not as a possessive quantifier
POSSESSIVE, GREEDY = r"\p{N}{1,3}+|", r"\p{N}{1,3}|"
CARD = Path(__file__).with_name("model_card.md.jinja")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run with its final weights in fp32 on the CPU. Its data need not be available."""

    path: Path
    spec: RunSpec
    record: dict[str, Any]
    model: Transformer

    @property
    def config(self) -> dict[str, Any]:
        """The dotted config keys that affect the result, without local paths."""
        return {key: value for key, value in sorted(result_keys(self.spec.written).items()) if key not in PLACES}


def export(run: str | None, to: str | None, overwrite: bool, tokenizer_path: str | None = None) -> None:
    """Export a run to the folder `to`, or every finished run in a folder to `to`/<run>.

    Args:
        run: folder of a run, or of several runs.
        to: folder to write.
        overwrite: replace the export of another run.
        tokenizer_path: copy of cl100k_base. The path in the run's config is ignored, because it may be untrusted.

    Raises:
        UserError: a run is unfinished or damaged, no architecture can express it, or the folder is in use. With
            several runs, all other runs are exported first.
    """
    if not run or not to:
        raise UserError("give run=outputs/<name>/<run> and to=FOLDER")
    require_transformers()
    path, target = Path(run), Path(to).resolve()
    runs, failures = find_runs(path), 0
    if runs == [path]:
        export_run(path, target, overwrite, tokenizer_path)
        return
    for each in runs:
        try:
            export_run(each, target / each.name, overwrite, tokenizer_path)
        except UserError as error:
            failures += 1
            console().print(f"not exported: {error}", soft_wrap=True)
    if failures:
        raise UserError(f"{failures} of {len(runs)} finished runs in {path} could not be exported")


def export_run(path: Path, target: Path, overwrite: bool, tokenizer_path: str | None) -> None:
    """Export one run to one folder. Nothing is written unless all checks pass."""
    run = read_run(path)
    require_free(target, run.spec.hash, overwrite)
    encoder = open_encoder(run.spec.config.data.model_copy(update={"tokenizer_path": tokenizer_path}))
    tokenizer = encoder if isinstance(encoder, Tokenizer) else None
    about = TOKENIZER.format(vocab_size=tokenizer.vocab_size, eot=tokenizer.eot) if tokenizer else NO_TOKENIZER
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_files(run, tokenizer, encoder.eot, part)
        (part / "README.md").write_text(model_card(run, about), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {target}: {reason}; free disk space or choose another to=") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    console().print(f"saved {path} as {architecture_of(run.model.shape).class_name}: {target}", soft_wrap=True)
    console().print(f"tokenizer: {about}", soft_wrap=True)


def read_run(path: Path) -> FinishedRun:
    """Load a run for export; `UserError` unless it is finished and transformers can compute its model."""
    spec, record = read_finished_run(path)
    shape = transformer_shape(spec, end_of_text=0)  # only document masks, which cannot be exported, need the token
    try:
        architecture = architecture_of(shape)
        balancing = build_strategies(spec, shape)
        if shape.num_experts:
            require_unsteered(balancing, shape.num_experts, shape.top_k, architecture.name)
    except UserError as error:
        raise UserError(f"{path} cannot be exported: {error}") from None
    model = Transformer(shape, "reference" if shape.num_experts else None)
    for router in model.routers:  # strategies can only parametrize finite weights; the checkpoint overwrites them
        init_router(router.weight_ED, "normal_unit", 1.0, generator(0, "router"))
    balancing.prepare(model.routers)
    module = nn.ModuleDict({"model": model, "balancing": balancing})  # the attribute names in LitMoE
    module.load_state_dict(read_weights(path / "checkpoints" / FINAL, spec.hash))
    return FinishedRun(path, spec, record, model.eval())


@torch.no_grad()
def require_unsteered(balancing: Composition, num_experts: int, top_k: int, architecture: str) -> None:
    """Raise `UserError` if a strategy changes the logits or the choice of experts in evaluation mode.

    A strategy that changes nothing returns the logits tensor itself.
    """
    logits_NE, tokens_BS = torch.zeros(1, num_experts), torch.zeros(1, 1, dtype=torch.int64)
    candidates = Candidates(0, tokens_BS, logits_NE, apply_gating(logits_NE, "softmax"), top_k)
    if balancing.mapper is not None:
        raise UserError(f"balancing.{balancing.mapper} computes the router logits differently from {architecture}")
    if balancing.adjuster is not None:
        raise UserError(f"balancing.{balancing.adjuster} adjusts the router logits, which {architecture} does not")
    for name in balancing.choosers:
        if balancing.parts[name].eval().choice_scores(candidates) is not logits_NE:
            raise UserError(f"balancing.{name} changes the choice of experts, which {architecture} does not")


def require_free(target: Path, config_hash: str, overwrite: bool) -> None:
    """Raise `UserError` unless `target` is missing, empty, or an export that may be replaced.

    An earlier export of the same run is always replaced, and an export of another run with `overwrite`. Other files are
    never replaced.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: choose another to=")
    names = {file.name for file in target.iterdir()} if target.exists() else set()
    if others := sorted(names - FILES):
        raise UserError(f"{target} contains {others[0]!r}, which is not part of an export: choose another to=")
    same_run = FACTS in names and json.loads((target / FACTS).read_bytes()).get("config_hash") == config_hash
    if names and not overwrite and not same_run:
        raise UserError(f"{target} contains the export of another run: choose another to= or set overwrite=true")


def _write_files(run: FinishedRun, tokenizer: Tokenizer | None, eot: int, folder: Path) -> None:
    """Write all files of an export except the model card."""
    from transformers import GenerationConfig

    seq_len = run.spec.config.data.seq_len
    weights = {
        name: weight.clone(memory_format=torch.contiguous_format) for name, weight in named_weights(run.model).items()
    }
    save_file(weights, folder / SINGLE, {"format": "pt"})
    hf_config(run.model.shape, seq_len, eot).save_pretrained(folder)
    GenerationConfig(bos_token_id=eot, eos_token_id=eot).save_pretrained(folder)
    if tokenizer:
        write_tokenizer(tokenizer, seq_len, folder)
    facts = {key: run.record[key] for key in PUBLISHED if key in run.record}
    facts |= {"config_hash": run.spec.hash, "config": run.config, "data": run.record["data"]["tokens"]}
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, seq_len: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer.

    As in training, no special token is added, and text that spells a special token stays text. Unused ids below end of
    text (cl100k_base has one) get a placeholder name.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    unused = [f"<|unused_{rank}|>" for rank in range(len(tokenizer.ranks), tokenizer.eot)]
    pattern = PATTERN.replace(POSSESSIVE, GREEDY)
    converter: Any = TikTokenConverter(pattern=pattern, extra_special_tokens=[*unused, END_OF_TEXT])
    converter.load_tiktoken_bpe = lambda _: tokenizer.ranks  # the original reads a file
    converter.converted().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # known to transformers 4 and 5
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def model_card(run: FinishedRun, about_tokenizer: str) -> str:
    """Return the model card of a run in Markdown. It contains no local paths."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["code"] = lambda value: f"`{' '.join(str(value).split())}`"  # a Markdown code span
    return environment.from_string(CARD.read_text(encoding="utf-8")).render(
        name=run.path.resolve().name,
        class_name=architecture_of(run.model.shape).class_name,
        parameters=count_parameters(run.model),
        shape=run.model.shape,
        seq_len=run.spec.config.data.seq_len,
        tokenizer=about_tokenizer,
        record=run.record,
        config=run.config,
    )

"""Writes finished runs as folders in Hugging Face's format, with their tokenizer and a model card."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from simbal.analysis.shared.trained import runs_in
from simbal.data.document import Encoder
from simbal.data.store import open_encoder
from simbal.data.tokenizer import PATTERN, Tokenizer
from simbal.errors import UserError
from simbal.files.console import console
from simbal.files.disk import refusal, sync
from simbal.host.weight_files import CONFIG, SINGLE, read_json
from simbal.hub.architecture import architecture, config_json
from simbal.hub.card import model_card
from simbal.hub.finished_run import FinishedRun, read_run
from simbal.hub.weights import views
from simbal.runs.spec import result_keys

NAMED_BY_USERS = ("files", "dclm")  # sources whose config holds paths or URLs
NO_TOKENIZER = "There is none: the run was trained on data=synthetic, whose symbols stand for no text."
TOKENIZER = (
    "AutoTokenizer reads it: cl100k_base, whole or cut to its first ids; {vocab_size:,} ids, of which {eot} is end of "
    "text. Nothing is put before or after a text; in training an end of text stood after every document."
)
FACTS = "simbal.json"  # what is known of the run
FILES = {"README.md", CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", SINGLE, FACTS}
OS_ERROR = re.compile(r"\(os error (\d+)\)")
END_OF_TEXT = "<|endoftext|>"
OURS, THEIRS = r"\p{N}{1,3}+|", r"\p{N}{1,3}|"  # there {1,3}+ is no possessive repetition, but a repetition of one


def export(run: str | None, to: str | None, overwrite: bool, tokenizer_path: str | None = None) -> None:
    """Write a run to the folder `to`, or each finished run of a folder of runs to `to`/<its name>.

    `tokenizer_path` is the user's, None for the default paths: that of a run's config, which anybody may have written,
    is never read.

    Raises:
        UserError: a run is unfinished or damaged, or no architecture can express it, or the folder is taken; of a
            folder of runs the others are exported all the same.
    """
    if not isinstance(run, str) or not isinstance(to, str) or not run or not to:
        raise UserError("give run=outputs/<name>/<run> and to=FOLDER")
    path, target = Path(run), Path(to).resolve()
    runs, out = runs_in(path), console()
    if runs == [path]:
        export_run(path, target, overwrite, out, tokenizer_path)
        return
    refused = 0
    for each in runs:
        try:
            export_run(each, target / each.name, overwrite, out, tokenizer_path)
        except UserError as error:
            refused += 1
            out.print(f"not exported: {error}", soft_wrap=True)
    if refused:
        raise UserError(f"{refused} of the {len(runs)} finished runs in {path} could not be exported")


def export_run(path: Path, target: Path, overwrite: bool, out: Console, tokenizer_path: str | None) -> None:
    """Write one run to one folder; everything is checked before anything is written."""
    run = read_run(path)
    require_free(target, run.spec.hash, overwrite)
    encoder = open_encoder(run.spec.config.data.model_copy(update={"tokenizer_path": tokenizer_path}))
    if isinstance(encoder, Tokenizer):
        require_converter()
    with appearing(target) as folder:
        sentence = _write(run, encoder, folder)
    out.print(f"written: {target}, a {architecture(run.model.shape).class_name} of {path}", soft_wrap=True)
    out.print(f"tokenizer: {sentence}", soft_wrap=True)
    if run.spec.config.data.source in NAMED_BY_USERS:
        out.print(f"README.md and {FACTS} name the files of its data: look at them before you publish", soft_wrap=True)


def require_free(target: Path, config_hash: str, overwrite: bool) -> None:
    """Raise `UserError` unless an export of the run with this hash may be written there.

    It may replace an earlier one of the same run, with `overwrite` that of another; files that no export writes are
    never removed.
    """
    try:
        names = {file.name for file in target.iterdir()} if target.exists() else set()
    except OSError as error:
        raise UserError(refusal(target, error, "to")) from None
    if foreign := sorted(names - FILES):
        raise UserError(f"{target} holds {foreign[0]!r}, which is no file of an export: choose another to=")
    if not names or overwrite:
        return
    if FACTS not in names or read_json(target / FACTS).get("config_hash") != config_hash:
        raise UserError(
            f"{target} holds something other than an export of this run: choose another to=, or overwrite=true"
        )


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`, which is synced and takes its place at the end.

    What is there already is renamed first, to end in .old. What a killed process has left is tidied up before.

    Raises:
        UserError: the disk refuses; what was there is there still.
    """
    part, old = (target.with_name(f".{target.name}.{gethostname()}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        _tidy_up(target)
        part.mkdir(parents=True)
        yield part
        for file in (*part.iterdir(), part):
            sync(file)
        if target.exists():
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(refusal(target, _of_the_disk(error), "to")) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def require_converter() -> None:
    """Raise `UserError` if transformers, which brings the converter, is not installed."""
    if find_spec("transformers") is None:
        raise UserError("the run's tokenizer is converted by transformers: pip install 'simbal[export]'")


def write_tokenizer(tokenizer: Tokenizer, seq_len: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer.

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


def oniguruma_pattern() -> str:
    """Return the pattern that cuts text into pieces before they are encoded, in Oniguruma's syntax."""
    assert PATTERN.count(OURS) == 1, "the pattern of simbal.data.tokenizer has changed"
    return PATTERN.replace(OURS, THEIRS)


def _write(run: FinishedRun, encoder: Encoder, folder: Path) -> str:
    """Write all files of an export, and return a sentence on the tokenizer."""
    seq_len = run.spec.config.data.seq_len
    weights = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views(run.model).items()}
    save_file(weights, folder / SINGLE, {"format": "pt"})
    _write_json(folder / CONFIG, config_json(run.model.shape, seq_len, encoder.eot))
    ends = {"bos_token_id": encoder.eot, "eos_token_id": encoder.eot}
    _write_json(folder / "generation_config.json", ends)
    sentence = NO_TOKENIZER
    if isinstance(encoder, Tokenizer):
        write_tokenizer(encoder, seq_len, folder)
        sentence = TOKENIZER.format(vocab_size=encoder.vocab_size, eot=encoder.eot)
    facts = {"config_hash": run.spec.hash, "config": result_keys(run.spec.written), "record": run.record}
    _write_json(folder / FACTS, facts)
    (folder / "README.md").write_text(model_card(run, sentence), encoding="utf-8", errors="replace")
    return sentence


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _tidy_up(target: Path) -> None:
    """Remove what killed processes of this machine have half written, and put back what they had renamed."""
    pattern = f".{escape(target.name)}.{escape(gethostname())}.*."
    for path in (*target.parent.glob(f"{pattern}part"), *target.parent.glob(f"{pattern}old")):
        process = path.name.split(".")[-2]
        if not process.isdigit() or _is_alive(int(process)):
            continue
        if path.suffix == ".old" and not os.path.lexists(target):
            path.rename(target)
        else:
            shutil.rmtree(path)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (OSError, OverflowError) as error:  # another user's process is alive, and a number too large is none of ours
        return not isinstance(error, ProcessLookupError)
    return True


def _of_the_disk(error: OSError | SafetensorError) -> OSError:
    """Return the disk's error, which safetensors says in words, with its number."""
    if isinstance(error, OSError):
        return error
    said = OS_ERROR.search(str(error))
    return OSError(int(said[1]), os.strerror(int(said[1]))) if said else OSError(" ".join(str(error).split()))


def _converted(tokenizer: Tokenizer) -> Any:
    """Return the `tokenizers.Tokenizer` of a run's tokenizer.

    Ids without a rank below end of text (one in the whole cl100k_base) get a name.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    unused = [f"<|unused_{rank}|>" for rank in range(len(tokenizer.ranks), tokenizer.eot)]
    converter: Any = TikTokenConverter(pattern=oniguruma_pattern(), extra_special_tokens=[*unused, END_OF_TEXT])
    # its own reader wants a file, and keeps a copy under the file's name in the temporary folder
    converter.load_tiktoken_bpe = lambda _: tokenizer.ranks
    return converter.converted()

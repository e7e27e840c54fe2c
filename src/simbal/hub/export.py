"""Writes finished runs as folders in Hugging Face's format."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from simbal.analysis.trained import runs_in
from simbal.console import console
from simbal.data.sources import Encoder, open_encoder
from simbal.data.tokenizer import Tokenizer
from simbal.errors import UserError
from simbal.hub.architecture import architecture, config_json
from simbal.hub.card import model_card
from simbal.hub.finished_run import FinishedRun, read_run
from simbal.hub.target_folder import FACTS, appearing, require_free
from simbal.hub.tokenizer import require_converter, write_tokenizer
from simbal.hub.weight_files import SINGLE
from simbal.hub.weights import views
from simbal.run_spec import result_keys

NAMED_BY_USERS = ("files", "dclm")  # sources whose config holds paths or URLs
NO_TOKENIZER = "There is none: the run was trained on data=synthetic, whose symbols stand for no text."
TOKENIZER = (
    "AutoTokenizer reads it: cl100k_base, whole or cut to its first ids; {vocab_size:,} ids, of which {eot} is end of "
    "text. Nothing is put before or after a text; in training an end of text stood after every document."
)


def export(run: str | None, to: str | None, overwrite: bool) -> None:
    """Write a run to the folder `to`, or each finished run of a folder of runs to `to`/<its name>.

    Raises:
        UserError: a run is unfinished or damaged, or Mixtral and Llama cannot express it, or the place is taken; of a
            folder of runs the others are exported all the same.
    """
    if not isinstance(run, str) or not isinstance(to, str) or not run or not to:
        raise UserError("give run=outputs/<name>/<run> and to=FOLDER")
    path, target = Path(run), Path(to).resolve()
    runs, out = runs_in(path), console()
    if runs == [path]:
        export_run(path, target, overwrite, out)
        return
    refused = 0
    for each in runs:
        try:
            export_run(each, target / each.name, overwrite, out)
        except UserError as error:
            refused += 1
            out.print(f"not exported: {error}", soft_wrap=True)
    if refused:
        raise UserError(f"{refused} of the {len(runs)} finished runs in {path} could not be exported")


def export_run(path: Path, target: Path, overwrite: bool, out: Console) -> None:
    """One run to one folder; everything is checked before anything is written."""
    run = read_run(path)
    require_free(target, run.spec.hash, overwrite)
    encoder = open_encoder(run.spec.config["data"])
    if isinstance(encoder, Tokenizer):
        require_converter()
    with appearing(target) as folder:
        sentence = _write(run, encoder, folder)
    out.print(f"written: {target}, a {architecture(run.model.shape)} of {path}", soft_wrap=True)
    out.print(f"tokenizer: {sentence}", soft_wrap=True)
    if run.spec.config["data"]["source"] in NAMED_BY_USERS:
        out.print(f"README.md and {FACTS} name the files of its data: look at them before you publish", soft_wrap=True)


def _write(run: FinishedRun, encoder: Encoder, folder: Path) -> str:
    """All files; what there is to say of the tokenizer."""
    seq_len = run.spec.config["data"]["seq_len"]
    weights = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views(run.model).items()}
    save_file(weights, folder / SINGLE, {"format": "pt"})
    _write_json(folder / "config.json", config_json(run.model.shape, seq_len, encoder.eot))
    ends = {"bos_token_id": encoder.eot, "eos_token_id": encoder.eot}
    _write_json(folder / "generation_config.json", ends)
    sentence = NO_TOKENIZER
    if isinstance(encoder, Tokenizer):
        write_tokenizer(encoder, seq_len, folder)
        sentence = TOKENIZER.format(vocab_size=encoder.vocab_size, eot=encoder.eot)
    facts = {"config_hash": run.spec.hash, "config": result_keys(run.spec.config), "record": run.record}
    _write_json(folder / FACTS, facts)
    (folder / "README.md").write_text(model_card(run, sentence), encoding="utf-8", errors="replace")
    return sentence


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

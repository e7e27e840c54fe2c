"""The subcommands `evaluate`, `export`, `prepare`, `report` and `runs`."""

import gc
import inspect
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from simbal.cli.command_line import run
from simbal.commands import format_command
from simbal.errors import ConfigError, UserError, exit_on_user_error

HF_KEYS = ("hf", "name", "context", "dtype")
TRAINING_KEYS = ("data.seq_len", "data.vocab_size", "data.validation_tokens", "data.document_mask")
ANALYSIS_INPUTS = ("model", "hardware", "gpus")  # passed to the analyses that have a parameter of this name
SORT_ALIASES = {"loss": "val/loss", "ppl": "val/ppl"}


def evaluate(argv: list[str]) -> None:
    """Run analyses, print their tables and save results to <run>/analysis/, or to outputs/analysis/ without a run.

    Examples:
        python evaluate.py run=outputs/default analysis=quality       # every finished run in the folder
        python evaluate.py hf=FOLDER data=pysource 'analysis=[quality,redundancy,routing]'   # a Hugging Face model
        python evaluate.py analysis=orthogonalization
        python evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8
        python evaluate.py 'analysis=[orthogonalization,flops]' analysis.flops.preset=moe_m
    """
    run(evaluate_composed, evaluate.__doc__, argv, "evaluate")


def evaluate_composed(cfg: Any) -> None:
    """Run the analyses of a config that Hydra composed."""
    from simbal.analysis.evaluate import evaluate  # imports torch, which takes 3 s
    from simbal.analysis.trained import DataPlaces
    from simbal.config.compose import resolve, validate
    from simbal.hf.load import HFRequest

    config = resolve(cfg)
    if not config.get("analysis"):
        raise ConfigError("set analysis=NAME; --help lists the names")
    inputs = {key: config.get(key) for key in ANALYSIS_INPUTS}
    keys = {key: config[key] for key in ("run", "overwrite", "accelerator", "output_dir")}
    if config["hf"] is not None:
        _refuse_overrides(TRAINING_KEYS, "has no effect with hf=, where context= sets the tokens per window")
        request = HFRequest(**{key: config[key] for key in (*HF_KEYS, "data", "accelerator", "output_dir")})
        evaluate(config["analysis"], **keys, inputs=inputs, hf=request)
        return
    if "source" in config["data"]:
        raise UserError(f"data={config['data']['source']} needs hf=: a run is measured on the data of its training")
    _refuse_overrides(HF_KEYS[1:], "needs hf=")
    evaluate(config["analysis"], **keys, inputs=inputs, places=validate(DataPlaces, config["data"], "data."))


def _refuse_overrides(keys: Collection[str], reason: str) -> None:
    """Raise `UserError` if the command line sets one of these keys, which would have no effect."""
    from hydra.core.hydra_config import HydraConfig

    for override in HydraConfig.get().overrides.task:
        if (key := override.partition("=")[0].lstrip("+")) in keys:
            raise UserError(f"{key}= {reason}: leave it out")


def export(argv: list[str]) -> None:
    """Export trained models to the Hugging Face format, for transformers, vLLM and lm-eval.

    Examples:
        python export.py run=outputs/default/RUN to=model
        python export.py run=outputs/default to=models       # every finished run, to models/RUN
    """
    run(export_composed, export.__doc__, argv, "export")


def export_composed(cfg: Any) -> None:
    """Export the runs of a config that Hydra composed."""
    from simbal.config.compose import resolve
    from simbal.hf.export import export  # imports torch, which takes 3 s

    config = resolve(cfg)
    export(config["run"], config["to"], config["overwrite"], config["data"]["tokenizer_path"])


def prepare(argv: list[str]) -> None:
    """Tokenize text and save the tokens, which a run otherwise does before training.

    Examples:
        python prepare.py
        python prepare.py data=files data.files='books/*.jsonl.zst' data.vocab_size=32768
        python prepare.py check=true                # verify the checksums of prepared data
    """
    run(prepare_composed, prepare.__doc__, argv, "prepare")


def prepare_composed(cfg: Any) -> None:
    """Prepare or verify the data of a config that Hydra composed, and print a summary."""
    from simbal.config.compose import resolve
    from simbal.data.prepare import prepare_or_check

    config = resolve(cfg)
    for line in prepare_or_check(config["data"], config["check"]):
        print(line)


def report(argv: list[str]) -> None:
    """Print the table of a sweep from its run folders and save it there, or compare two sweeps.

    Examples:
        python report.py outputs/default
        python report.py outputs/default baseline=none
        python report.py outputs/default baseline='simbal coef=0.1'               # an arm as the table names it
        python report.py outputs/default compare=all                              # every pair of arms
        python report.py outputs/default equivalence_margin=0.01                  # in nats per token
        python report.py outputs/default power=true                               # how many more seeds are needed
        python report.py outputs/default figures=true                             # SVG and PDF figures, and curves.csv
        python report.py outputs/default explain=true                             # define every number
        python report.py outputs/default outputs/changed                          # compare the runs of two folders
        python report.py outputs/default 'columns=[ppl,min_pes,seu]' paper=true   # choose columns; the paper's numbers
    """
    gc.disable()  # the garbage collector would scan the records of a thousand runs for a fifth of the time
    parser = _parser(report)
    parser.add_argument("folder", help="outputs/<name>, which holds one folder per run")
    parser.add_argument("more", nargs="*", metavar="key=value", help="as above; or another folder to compare with")
    args, flags = parser.parse_known_args(argv)
    others = [Path(text) for text in args.more if Path(text).is_dir()]
    with exit_on_user_error():
        if flags:
            raise UserError(f"report has no flag {flags[0]}: keys are given as key=value, such as baseline=none")
        if len(others) > 1:
            raise UserError(f"report takes one or two folders, not {1 + len(others)}")
        from simbal.report.report import parse_keys, report_both
        from simbal.report.report import report as report_one

        keys = parse_keys([text for text in args.more if Path(text) not in others])
        if others:
            report_both(Path(args.folder), others[0], **keys)
        else:
            report_one(Path(args.folder), **keys)


def runs(argv: list[str]) -> None:
    """List runs with their status, loss, duration and size on disk, or delete them.

    Examples:
        simbal runs                                        # all runs in outputs/, newest first
        simbal runs outputs/default --sort loss --limit 5  # the five best runs of a sweep
        simbal runs --json                                 # all values of each run, for scripts
        simbal runs delete RUN ...

    The status is finished, failed, diverged, pruned, killed, running, unfinished or damaged.
    """
    if argv[:1] == ["delete"]:
        _delete_runs(argv[1:])
        return
    parser = _parser(runs)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("outputs")], help="default: outputs/")
    parser.add_argument("--sort", metavar="KEY", help="loss, ppl or a key of --json, in ascending order")
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument("--limit", type=int, metavar="N", help="list only the first N")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        if args.limit is not None and args.limit < 1:
            raise UserError(f"--limit {args.limit} must be at least 1")
        from simbal.console import console
        from simbal.report.runs import list_runs, print_runs

        listed = _sort_runs([run.values for run in list_runs(args.folders)], args.sort, args.reverse)
        shown = listed[: args.limit]
        if args.json:
            try:
                print(json.dumps(shown, indent=1), flush=True)
            except BrokenPipeError:  # a reader such as head has closed the pipe
                console().on_broken_pipe()
        elif shown:
            print_runs(shown, len(listed) - len(shown), console())
        else:
            print("no runs")


def _sort_runs(rows: list[dict[str, Any]], name: str | None, reverse: bool) -> list[dict[str, Any]]:
    """Return runs sorted by the value `name`, or newest first if None. Runs without the value come last.

    Raises:
        UserError: no run has such a value.
    """
    from simbal.config.messages import suggest
    from simbal.runs.record import is_number

    key = SORT_ALIASES.get(name, name) if name else "when"
    if rows and not any(key in run for run in rows):
        raise UserError(f"runs have no {name}{suggest(str(name), [*rows[0], *SORT_ALIASES])}")

    def order(run: dict[str, Any]) -> tuple[bool, float, str]:
        return (False, run[key], "") if is_number(run[key]) else (True, 0.0, str(run[key]))

    known = [run for run in rows if run.get(key) is not None]
    unknown = [run for run in rows if run.get(key) is None]
    return sorted(known, key=order, reverse=reverse != (name is None)) + unknown


def _delete_runs(argv: list[str]) -> None:
    parser = ArgumentParser(prog="simbal runs delete", description="Delete run folders after asking for confirmation.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="outputs/<name>/<run>, or outputs/<name>")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    args = parser.parse_args(argv)
    with exit_on_user_error():
        from rich.filesize import decimal

        from simbal.report.runs import size_on_disk
        from simbal.runs.folder import delete_runs, run_folders

        folders = run_folders(args.runs)
        count = f"{len(folders)} run{'s' * (len(folders) != 1)}"
        if not args.yes:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise UserError(f"deleting {count} needs confirmation: add --yes")
            print(*(f"  {folder}" for folder in folders), sep="\n")
            try:
                answer = input(f"Delete {count}, {decimal(sum(map(size_on_disk, folders)))}? [y/N] ")
            except EOFError:  # Ctrl-D
                answer = "n"
            if answer.strip().lower() not in ("y", "yes"):
                raise UserError("no run was deleted")
        delete_runs(folders)
        print(f"deleted: {count}")


def _parser(function: Callable[[list[str]], None]) -> ArgumentParser:
    about = format_command(inspect.getdoc(function) or "")
    return ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)

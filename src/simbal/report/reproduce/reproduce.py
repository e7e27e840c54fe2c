"""Runs the studies one after another, by the commands that a user would give."""

import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from simbal.commands import as_typed
from simbal.errors import UserError
from simbal.files.disk import write_text
from simbal.report.collect import collect
from simbal.report.reproduce.budgets import budgets
from simbal.report.reproduce.drawing import CURVES, draw, write_curves
from simbal.report.reproduce.evidence import Study, analyses, spent, studies, write
from simbal.report.reproduce.kept import RUNS, bring_back, keep
from simbal.report.reproduce.texts import write_texts
from simbal.report.reproduce.verify import verify
from simbal.runs.folder import RECORD_FILE

PLACES = ("data.cache_dir=", "data.tokenizer_path=")  # evaluate.py does not take these from a run
FAILED_JOBS = 1  # exit code of a sweep of which some jobs have no result: its table says so


def reproduce(config: dict[str, Any]) -> None:
    """Train, analyse and write down every study, or only draw the figures again, or only check what is printed.

    Args:
        config: of conf/reproduce.yaml, resolved.

    Raises:
        UserError: a command has failed, the config asks for what is not there, or a printed number is wrong.
    """
    chosen, results, only = studies(config), Path(config["results_dir"]), config["only"]
    if config["verify"]:
        verify(results)
        return
    gaps = {name: of for name, of in config["scale"]["budgets"].items() if only is None or name in only}
    if config["figures"]:
        for name in [*(study.name for study in chosen), *gaps]:
            _draw_again(results / name, asked_for=only is not None)
        write_texts(results)
        return
    for study in chosen:  # a broken archive is found before anything is trained
        if back := bring_back(results / study.name, study.folder):
            print(f"{back} runs from {results / study.name / RUNS}", flush=True)
    _say_cost(chosen, results)
    for study in chosen:
        command = _do(study, results / study.name)
        write(study, command, results / study.name)
        print(f"written: {results / study.name}")
    for name, of in gaps.items():
        write_curves(budgets(of, results), results / name)
        draw(results / name)
        print(f"written: {results / name}")
    for name, overrides in analyses(config).items():
        _look(overrides, results / name)
        print(f"written: {results / name}")
    if texts := write_texts(results):
        print(f"written: {len(texts)} texts in {results}")


def _say_cost(chosen: list[Study], results: Path) -> None:
    """Print what the studies have taken, as far as they were ever done, and the share of it whose runs are not here."""
    names = [study.name for study in chosen]
    tokens, seconds, runs = (spent(results, key, names) for key in ("tokens", "seconds", "runs"))
    if tokens:
        ended = {study.name: len([*study.folder.glob(f"*/{RECORD_FILE}")]) for study in chosen}
        left = sum(seconds[name] * max(0, 1 - ended[name] / runs[name]) for name in seconds)
        print(
            f"{len(tokens)} of {len(names)} studies took {sum(tokens.values()) / 1e6:.0f}M tokens and "
            f"{sum(seconds.values()) / 3600:.1f} hours of runs, several at once, when {results} was made; "
            f"some {left / 3600:.1f} hours are left",
            flush=True,
        )


def _draw_again(folder: Path, asked_for: bool) -> None:
    """Draw the figures of a study, or say that it has not been reproduced, unless it was `asked_for` by name."""
    if asked_for or (folder / CURVES).exists():  # a plan is there before, and the runs that are done
        draw(folder)
    else:
        print(f"left out: {folder.name}, which has not been reproduced")


def _do(study: Study, kept: Path) -> str:
    """Train what is not finished of a study and analyse it; return the command that trained.

    What is finished is kept in runs.tar.xz, also where the rest is not: by Ctrl-C, as by an error.
    """
    try:
        command = _run(["train", "-m", *study.overrides], allowed=(0, FAILED_JOBS))
        if not (study.folder / "table.json").exists():
            raise UserError(f"{command} has left no table: what it printed says why")
        if study.analyses:
            places = [override for override in study.overrides if override.startswith(PLACES)]
            _run(["evaluate", f"run={study.folder}", f"analysis=[{','.join(study.analyses)}]", *places])
    finally:
        if any(study.folder.glob("*/record.json")):
            keep(collect(study.folder), kept)
    return command


def _look(overrides: list[str], folder: Path) -> None:
    """Run an analysis of no run: its numbers go to analysis/<name>.json, what it prints to printed.txt."""
    with TemporaryFile("w+", encoding="utf-8") as printed:
        command = _run(["evaluate", *overrides, f"output_dir={folder}"], output=printed)
        printed.seek(0)
        write_text(folder / "printed.txt", f"$ {command}\n\n{printed.read()}")


def _run(arguments: list[str], allowed: tuple[int, ...] = (0,), output: IO[str] | None = None) -> str:
    program, *rest = arguments
    command = as_typed(f"python {shlex.join([f'{program}.py', *rest])}")
    print(command, flush=True)
    # -P: what lies in the current folder is no library
    process = [sys.executable, "-P", "-m", "simbal.cli.main", *arguments]
    code = subprocess.run(process, stdout=output, check=False).returncode
    if code not in allowed:
        raise UserError(f"{command} ended with exit code {code}: give the same command again to go on")
    return command

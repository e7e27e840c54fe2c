"""The two files of pins: what is asked in them, and what is written down of each answer."""

import hashlib
import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.golden import composing

COMMANDS, REFUSALS = (Path(__file__).with_name(f"{name}.yaml") for name in ("commands", "refusals"))
HEADERS = {
    COMMANDS: "What commands of train.py mean: each run's options, folder, hash and config.\n"
    "`config` has the keys in which it differs from `default`, and `without` those that it lacks. A sweep has a line\n"
    "for each job and a sha256 of all their configs.\n"
    "Written by python -m tests.golden.regenerate.",
    REFUSALS: "What command lines are refused with, before anything is trained.\n"
    "<tmp> is the working folder, in which `files` lie; modules of `absent` are not installed.\n"
    "Written by python -m tests.golden.regenerate.",
}
QUESTION = ("program", "arguments", "files", "environment", "absent")
Entry = dict[str, Any]


def read(file: Path) -> dict[str, Any]:
    return yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)


def text_of(file: Path, pins: dict[str, Any]) -> str:
    """The content of a file of pins."""
    header = "".join(f"# {line}\n" for line in HEADERS[file].splitlines())
    return header + yaml.dump(
        pins, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
    )


def question(entry: Entry) -> Entry:
    """An entry without its answer."""
    return {key: entry[key] for key in QUESTION if key in entry}


def command(entry: Entry) -> Entry:
    """What is pinned of the runs of a command: all of one run, a line of each job of a sweep."""
    arguments = shlex.split(entry["arguments"])
    jobs = composing.compose(arguments, entry.get("environment"))
    if jobs[0]["label"] is None:
        return _run(jobs[0])
    searches = {json.dumps(job["search"]): job["search"] for job in jobs if job["search"]}
    of_a_search = {"searches": [*searches.values()]} if searches else {}
    digest = _digest([[job["choices"], job["hash"], job["written"]] for job in jobs])
    return {"configs_sha256": digest, **of_a_search, "jobs": [*map(_job, jobs)]}


def default() -> Entry:
    """The run of train.py without arguments, with all of its config."""
    (job,) = composing.compose([])
    return _place(job) | {"config": job["flat"]}


def refusal(entry: Entry) -> Entry:
    """The exit code and the sentence that a command line is refused with."""
    keys = {key: value for key, value in question(entry).items() if key not in ("program", "arguments")}
    code, sentence = composing.refusal(entry["program"], shlex.split(entry["arguments"]), **keys)
    return {"code": code, "sentence": sentence}


def _run(job: Entry) -> Entry:
    plain = _plain_config()
    config = {key: value for key, value in job["flat"].items() if key not in plain or not _same(value, plain[key])}
    lacking = [key for key in plain if key not in job["flat"]]
    return _place(job) | {"config": config} | ({"without": lacking} if lacking else {})


def _place(job: Entry) -> Entry:
    return {key: job[key] for key in ("choices", "folder", "hash")} | {"config_sha256": _digest(job["written"])}


def _job(job: Entry) -> Entry:
    return {"overrides": shlex.join(job["overrides"]), "folder": job["folder"], "label": job["label"]}


@cache
def _plain_config() -> dict[str, Any]:
    return default()["config"]


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)  # which tells 1 from 1.0 and true


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""The plan of a study was there before its runs: plan.md was committed before the first of them began."""

import json
import subprocess
from datetime import datetime
from glob import escape
from pathlib import Path

from simbal.errors import UserError


def check_plan(study: Path) -> tuple[str, bool]:
    """Return what is known of when a study's plan.md was first committed, and whether that was too late.

    The date is the one that git keeps when commits are moved (the author's), held against the earliest `first_started`
    of the study's origin.json, or of those of its parts, studies whose names begin with its own.

    Raises:
        UserError: an origin.json does not say when the first run began.
    """
    whole = study / "origin.json"
    origins = [whole] if whole.exists() else sorted(study.parent.glob(f"{escape(study.name)}_*/origin.json"))
    if not origins:
        return "its study has no origin.json to hold it against", False
    started = min(map(_first_started, origins))
    committed = first_commit(study / "plan.md")
    if committed is None:
        return "not verified, as git does not know its first commit here", False
    if committed < started:
        return "committed before the first run began", False
    return f"WRONG: committed at {committed.isoformat()}, after the first run began, {started.isoformat()}", True


def _first_started(origin: Path) -> datetime:
    try:
        return datetime.fromisoformat(json.loads(origin.read_bytes())["first_started"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{origin} does not say when the first run began") from None


def first_commit(file: Path) -> datetime | None:
    """Return when a file was first committed; None where that is not known, as in a shallow clone."""
    try:
        shallow = _git(file.parent, "rev-parse", "--is-shallow-repository")
        dates = _git(file.parent, "log", "--follow", "--diff-filter=A", "--format=%aI", "--", file.name).split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return datetime.fromisoformat(dates[-1]) if dates and shallow == "false" else None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=folder, text=True, stderr=subprocess.DEVNULL).strip()

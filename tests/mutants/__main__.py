"""Check that the fast tests detect each deliberate mistake in mistakes.yaml (`make mutants`).

python -m tests.mutants [FILE ...]: makes each mistake in these files of src/simbal (default: all) in a temporary copy
of the repository. Prints a line per mistake and the fraction that is detected, and fails if one is not detected.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
# exit codes of pytest; -x stops workers in the middle, -k may choose no test; any other is no answer
PASSED, FAILED, STOPPED, NONE_CHOSEN = 0, 1, 2, 5
LONGEST_SECONDS = 1800  # a mistake may let a loop go on for ever


@dataclass(frozen=True)
class Mistake:
    """A code snippet and its wrong replacement."""

    file: str  # of src/simbal
    code: str
    wrong: str
    tests: Sequence[str]

    def made_in(self, root: Path) -> None:
        """Make the mistake in a copy of the repository; `ValueError` unless the code stands there exactly once."""
        path = root / "src" / "simbal" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.code) != 1:
            raise ValueError(f"{self.file} has {text.count(self.code)} times: {self.code}")
        path.write_text(text.replace(self.code, self.wrong), encoding="utf-8")


def mistakes(files: Sequence[str] = ()) -> Iterator[Mistake]:
    """Return the mistakes in `files`; without files, all mistakes."""
    listed: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
    for entry in listed:
        if not files or entry["file"] in files:
            yield from (Mistake(entry["file"], tests=entry["tests"], **mistake) for mistake in entry["mistakes"])


def copied(folder: Path) -> Path:
    """Return a copy of all files that git tracks or would track."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0"):
        if name and os.path.lexists(REPOSITORY / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    return folder


def fails(tests: Sequence[str], root: Path) -> str:
    """Return the output of pytest if a test fails or hangs in the copy, otherwise nothing."""
    options = ["-x", "-q", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {LONGEST_SECONDS} s"
    if done.returncode not in (PASSED, FAILED, STOPPED, NONE_CHOSEN):
        raise RuntimeError(f"pytest has not run:\n{done.stdout}\n{done.stderr}")
    return done.stdout if done.returncode in (FAILED, STOPPED) else ""


def sees(mistake: Mistake, root: Path) -> bool:
    """Whether a test fails: those that are named like the file are tried first, as most likely to."""
    return any(fails([*mistake.tests, *likely], root) for likely in (("-k", Path(mistake.file).stem), ()))


def main(files: Sequence[str]) -> int:
    """Try the mistakes; return how many no test has seen."""
    unseen, tried = 0, [*mistakes(files)]
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        if said := fails(sorted({tests for mistake in tried for tests in mistake.tests}), root):
            raise SystemExit(f"the tests fail without any mistake:\n{said}")
        for mistake in tried:
            path = root / "src" / "simbal" / mistake.file
            whole = path.read_text(encoding="utf-8")
            mistake.made_in(root)
            seen = sees(mistake, root)
            path.write_text(whole, encoding="utf-8")
            unseen += not seen
            print("seen  " if seen else "UNSEEN", mistake.file, mistake.wrong.strip(), flush=True)
    print(f"{len(tried) - unseen} of {len(tried)} mistakes are seen")
    return unseen


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))

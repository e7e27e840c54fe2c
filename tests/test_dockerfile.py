"""The image does what the Makefile does; that it can be built is not shown here, for want of Docker."""

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = [
    line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")
]  # no instruction goes over several lines
TARGETS = {*re.findall(r"^([a-z-]+):.*?## ", (ROOT / "Makefile").read_text(), re.MULTILINE)}
IGNORED = (ROOT / ".dockerignore").read_text().split()


def arguments(instruction):
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


def test_what_it_runs_are_targets_of_the_makefile():
    assert [json.loads(line) for line in arguments("ENTRYPOINT")] == [["make"]]
    assert [json.loads(line) for line in arguments("CMD")] == [["sweep"]]
    ran = [target for line in arguments("RUN") for target in re.findall(r"&& make (\S+)", line)]
    assert ran == ["setup"]
    assert {"sweep", *ran} <= TARGETS


def test_what_it_copies_is_there_and_nothing_that_is_checked_in_is_left_out():
    named = [name for line in arguments("COPY") for name in line.split()[:-1]]
    assert [name for name in named if not (ROOT / name).exists()] == []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = {part for name in tracked.splitlines() for part in Path(name).parts}
    assert [name for name in IGNORED if any(fnmatch(part, name.removeprefix("**/")) for part in parts)] == []


def test_what_git_ignores_is_not_sent_to_the_builder():
    assert {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()} <= {
        name.removeprefix("**/") for name in IGNORED
    }


@pytest.mark.slow  # starts Python anew
def test_the_package_can_be_set_up_from_what_is_copied_before_its_code(tmp_path):
    for name in arguments("COPY")[0].split()[:-1]:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    build = "from setuptools import build_meta; print(build_meta.build_editable('dist'))"
    (tmp_path / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [*(tmp_path / "dist").glob("simbal-*.whl")]

"""The Docker image uses targets of the Makefile. Without Docker, its build is not tested."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = [
    line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")
]  # no instruction goes over several lines
TARGETS = {*re.findall(r"^([a-z-]+):.*?## ", (ROOT / "Makefile").read_text(), re.MULTILINE)}


def arguments(instruction):
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


def test_the_image_runs_targets_of_the_makefile():
    assert [json.loads(line) for line in arguments("ENTRYPOINT")] == [["make"]]
    assert [json.loads(line) for line in arguments("CMD")] == [["sweep"]]
    ran = [target for line in arguments("RUN") for target in re.findall(r"&& make (\S+)", line)]
    assert ran == ["setup"]
    assert {"sweep", *ran} <= TARGETS

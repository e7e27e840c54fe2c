"""The commands in docs/guide/how_to.md work, here with fewer and shorter runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MARKOV, SMALL
from tests.programs import run

ROOT = Path(__file__).parents[2]
SIMBAL = str(Path(sys.executable).with_name("simbal"))
SECTIONS = re.findall(
    r"^## (.+?)$(.+?)(?=^## |\Z)", (ROOT / "docs/guide/how_to.md").read_text(encoding="utf-8"), re.M | re.S
)
SHORT = ("trainer.max_steps=2", "trainer.val_every=2", "optim.warmup_steps=1", "trainer.pes_tokens=64")
RESULTS = {
    "Compare coefficients": ["outputs/coefs/table.md", "outputs/coefs/index.html"],
    "Use your own text": ["outputs/text/table.md"],
    "Get a figure for a paper": ["outputs/coefs/figures/loss.pdf", "outputs/coefs/figures/curves.csv"],
    "Export a model": ["model/model.safetensors"],
    "Measure a Hugging Face model": ["outputs/zoo/olmoe/analysis/redundancy.json", "outputs/zoo/table.md"],
    "Search a coefficient or learning rate": ["outputs/search/trials.csv"],
}


def shorten(command: str, folder: Path) -> list[str]:
    """Return the command with less work, an existing run in place of RUN, and no question to answer."""
    runs = sorted(folder.glob("outputs/coefs/simbal-*"))
    command = re.sub(r"seed=0-\d", "seed=0,1", command.replace("/RUN", f"/{runs[0].name}" if runs else ""))
    program, *words = shlex.split(command)
    if program == "python":
        return [words[0]]
    if words[0] == "train":
        is_text = "data=files" in words
        has_config = any(word.startswith("from=") for word in words)
        words += SHORT if has_config else [*SMALL, *([] if is_text else MARKOV), *SHORT]
    return [SIMBAL, *words, *(["--yes"] if words[0] == "runs" and "delete" in words else [])]


@pytest.mark.slow
def test_the_commands_of_every_task_work(tmp_path):
    (tmp_path / "mine.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
    assert len(SECTIONS) > 8
    for title, text in SECTIONS:
        scripts = re.findall(r"^```python\n(.+?)^```", text, re.M | re.S)
        commands = [] if scripts else re.findall(r"^    (.+)$", text, re.M)
        assert commands or scripts, title
        for script in scripts:
            shortened = script.replace('"trainer=debug"', '"trainer=debug", "data=synthetic"')
            done = subprocess.run(
                [sys.executable, "-c", shortened], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{title}: {done.stdout}\n{done.stderr}"
        for command in commands:
            words = shorten(command, tmp_path)
            done = run(*words, cwd=tmp_path)
            assert done.returncode == 0, f"{title}: {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        for file in RESULTS.get(title, []):
            assert (tmp_path / file).exists(), f"{title}: {file}"
    assert [*tmp_path.glob("outputs/text/*/config.yaml")] == []  # deleted by a command

"""Prepare data: turn text into tokens on disk. train.py does this too if the data are not prepared yet.

Examples:
    python prepare.py
    python prepare.py data=files data.files='books/*.jsonl.zst' data.vocab_size=32768
    python prepare.py check=true                # verify prepared data
"""

from typing import Any

from simbal.cli.command_line import run
from simbal.errors import exit_on_user_error


def main(argv: list[str]) -> None:
    """Prepare or verify the data that a command line describes."""
    run(prepare_composed, __doc__, argv, "prepare")


def prepare_composed(cfg: Any) -> None:
    """Prepare the data that `cfg` describes, or verify existing data, and print a summary."""
    with exit_on_user_error():
        from simbal.config.compose import resolved
        from simbal.data.prepare import prepare_or_check

        config = resolved(cfg)
        for line in prepare_or_check(config["data"], config["check"]):
            print(line)

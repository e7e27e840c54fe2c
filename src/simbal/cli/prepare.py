"""Turn text into tokens on disk, which train.py would else do when it starts.

Examples:
    python prepare.py
    python prepare.py data=files data.files='books/*.jsonl.zst' data.vocab_size=32768
    python prepare.py check=true                # is what was prepared still whole?
"""

from typing import Any

from simbal.cli.command_line import run
from simbal.errors import exit_on_user_error


def main(argv: list[str]) -> None:
    """Prepare or check the data that a command line describes."""
    run(prepare_composed, __doc__, argv, "prepare")


def prepare_composed(cfg: Any) -> None:
    """Prepare the data that `cfg` describes, unless they are there, and say what they hold; or check them."""
    with exit_on_user_error():
        from simbal.config.compose import resolved
        from simbal.data.prepare import prepare_or_check

        config = resolved(cfg)
        for line in prepare_or_check(config["data"], config["check"]):
            print(line)

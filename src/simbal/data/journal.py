"""How far a build has come: what its finished units add up to, in a file that is replaced after each of them."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simbal.atomic_file import replace_text
from simbal.data.document import SPLITS

NAME = "journal.json"


@dataclass
class Journal:
    """Nothing finished yet, unless it is read from a folder."""

    planned: list[str] = field(default_factory=list)  # all units, in order
    units: list[str] = field(default_factory=list)  # those that are finished
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    inputs: list[dict[str, Any]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, folder: Path) -> "Journal":
        """The one that an interrupted build left, or an empty one."""
        file = folder / NAME
        if not file.exists():
            return cls()
        state = json.loads(file.read_text(encoding="utf-8"))
        return cls(**state | {"skipped": Counter(state["skipped"])})

    def write(self, folder: Path) -> None:
        """Replace the file at once, as a kill may come at any moment."""
        replace_text(folder / NAME, json.dumps(vars(self)))

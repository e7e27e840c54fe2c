"""How far a build has come: what its finished units add up to, in a file that is replaced after each of them."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simbal import strict_json
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
        """The one that an interrupted build left; an empty one if there is none, or none that makes sense."""
        try:
            state = strict_json.parse((folder / NAME).read_bytes())
            journal = cls(**state | {"skipped": Counter(state["skipped"])})
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return journal if journal.whole else cls()

    @property
    def whole(self) -> bool:
        """Whether each part is what it is to be."""
        counts = [*self.skipped.values()]
        for of_splits in (self.documents, self.tokens):
            if not isinstance(of_splits, dict) or {*of_splits} != {*SPLITS}:
                return False
            counts += of_splits.values()
        lists = isinstance(self.planned, list) and isinstance(self.units, list) and isinstance(self.inputs, list)
        begun = lists and self.units == self.planned[: len(self.units)]
        return begun and all(type(count) is int and count >= 0 for count in counts)

    def write(self, folder: Path) -> None:
        """Replace the file at once, as a kill may come at any moment."""
        replace_text(folder / NAME, json.dumps(vars(self)))

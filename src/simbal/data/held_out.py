"""A source without the text that models are trained on: what is held out, for a model that learns nothing from it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simbal.data.document import SPLITS, Document, Source
from simbal.data.sources.corpus import FileSource
from simbal.data.sources.files import Files

VALIDATION = SPLITS[1]


@dataclass(frozen=True)
class HeldOutOnly:
    """The documents of the validation split of another source; files that have none of them are not even read."""

    whole: Source

    def identity(self) -> dict[str, Any]:
        """Return all that decides the documents of the other source."""
        return self.whole.identity()

    def units(self) -> list[str]:
        """Return the names of the parts that may have such documents."""
        if isinstance(self.whole, FileSource) and self.whole.corpus.validation_one_in is None:
            return [item.name for item in self.whole.corpus.inputs if item.split == VALIDATION]
        return self.whole.units()

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield a unit's documents that are held out; `UserError` as the other source raises it."""
        for document in self.whole.read(unit, skipped):
            if document.split == VALIDATION:
                yield document

    def by_ends(self) -> "HeldOutOnly | None":
        """Return the source of the ends of these documents, for where no whole one is held out; None: there is none."""
        by_ends = self.whole.by_ends() if isinstance(self.whole, Files) else None
        return None if by_ends is None else HeldOutOnly(by_ends)

"""Recompute the numbers of every study in results/ from its rows.csv: python -m results.tools.verify."""

import sys
from pathlib import Path

from results.tools.pages import check_readme, check_table
from results.tools.rows import check_json, read_rows, read_table


def verify(results: Path) -> list[str]:
    """Return a sentence for each number that is not as the rows give it; a study without rows.csv is left out."""
    wrong = []
    for folder in sorted(file.parent for file in results.glob("*/rows.csv")):
        text = (folder / "table.md").read_text(encoding="utf-8")
        found = check_json(folder) + check_table(text, read_table(folder), [*read_rows(folder)])
        wrong += [f"{folder.name}: {sentence}" for sentence in found]
    for page in sorted(results.glob("**/README.md")):
        found = check_readme(page.read_text(encoding="utf-8"), results, page.parent.name)
        wrong += [f"{page.relative_to(results)}: {sentence}" for sentence in found]
    return wrong


if __name__ == "__main__":
    sentences = verify(Path(__file__).parents[1])
    print(*sentences, sep="\n", end="\n" if sentences else "")
    sys.exit(f"error: {len(sentences)} numbers in results/ do not follow from rows.csv" if sentences else 0)

"""results/ as it lies in the repository: pages, and the figures and tables that they link to."""

from pathlib import Path

from generators.markup import WIDE

FOLDER = "results"


def result_files(root: Path) -> dict[str, str]:
    """Every file by its path in the site, which is its path in the repository, so that links hold."""
    files = sorted(file for file in (root / FOLDER).rglob("*") if file.is_file())
    texts = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}
    return {path: WIDE + text if path.endswith(".md") else text for path, text in texts.items()}


def result_pages(files: dict[str, str]) -> list[str]:
    """Those for the navigation: the whole first, then every study."""
    readings = [path for path in files if path.startswith(f"{FOLDER}/") and path.endswith("/README.md")]
    return sorted(readings, key=lambda path: (path.count("/"), path))

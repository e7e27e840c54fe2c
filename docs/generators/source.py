"""Read comments of fields, docstrings and dictionaries from the source, without importing it."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_COMMENT = re.compile(r"\s+# (.+)$")


def parse(file: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(file.read_text(encoding="utf-8"))


def docstring(file: Path) -> str:
    """Return the docstring of a module; "" without one."""
    return ast.get_docstring(parse(file)) or ""


def fields(file: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the annotated fields of every class, each with its type and comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {
        node.name: {
            part.target.id: (ast.unparse(part.annotation), comment(lines[part.end_lineno - 1]))
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.end_lineno
        }
        for node in parse(file).body
        if isinstance(node, ast.ClassDef)
    }


def comment(line: str) -> str:
    """Return the comment at the end of a line; "" without one."""
    found = _COMMENT.search(line)
    return found[1].strip() if found else ""


def dictionaries(package: Path, names: set[str]) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Yield every module-level dictionary with one of these names, and its file."""
    for file in sorted(package.rglob("*.py")):
        for node in parse(file).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]) if name in names:
                    yield file, ast.literal_eval(node.value)

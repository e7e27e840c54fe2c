"""Pages for the modules that a reader of the code or of a table asks about, from their docstrings."""

from pathlib import Path

from generators import source
from generators.markup import prose, table

# all modules of a package, or the chosen ones
PACKAGES: dict[str, tuple[str, ...]] = {
    "balancing": (),
    "hf": ("attach", "trainer", "describe", "routers", "convert", "export"),
    "metrics": (),
    "model": ("transformer", "attention", "moe", "router", "head", "init"),
    "experts": ("backends", "select"),
    "cost": ("parameters", "memory"),
    "report": (
        "statistics", "conclusion", "documents", "tokens_to_loss", "comparison", "table", "notes", "columns", "arms",
        "power", "sequential", "collect", "paper", "report",
    ),
}  # fmt: skip


def api_pages(root: Path) -> dict[str, str]:
    """Return `api/<package>.md` for each of `PACKAGES`, and `api/index.md`."""
    pages = {f"api/{package}.md": _package(root, package) for package in PACKAGES}
    pages["api/api.md"] = "# simbal.api\n\n::: simbal.api\n"
    about = source.docstring(root / "src/simbal/api.py").split("\n\n")[0]
    rows = [("[simbal.api](api.md)", prose(about))] + [
        (f"[simbal.{package}]({package}.md)", prose(_about(root, package).split("\n\n")[0])) for package in PACKAGES
    ]
    text = (
        "# Code\n\nThe modules that strategies, metrics and tables are made of. A tensor's name ends in the letters of "
        "its shape: `B` batch, `S` sequence, `N` tokens, `V` vocabulary, `D` model width, `H` heads, `P` head width, "
        "`L` MoE layers, `E` experts, `K` experts per token, `F` width of an expert, `R` routed rows.\n\n"
    )
    return {"api/index.md": text + table(("package", "what it holds"), rows), **pages}


def _package(root: Path, package: str) -> str:
    folder = root / "src/simbal" / package
    names = PACKAGES[package] or sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    directives = [f"::: simbal.{package}.{name}\n" for name in names]
    return "\n".join([f"# simbal.{package}\n", prose(_about(root, package)) + "\n", *directives])


def _about(root: Path, package: str) -> str:
    return source.docstring(root / "src/simbal" / package / "__init__.py")
